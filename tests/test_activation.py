"""Every way in, in real interpreters of fresh virtual environments, parents and children alike.

The environments hold this project as a wheel or an editable install, and see the torch of the
running interpreter through a ``.pth`` file.
"""

import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import RELEASED, ROOT

PTH = "dynamo_cyclefix_autostart.pth"

# What a process says of itself.  It asks for the package without importing it, so that whatever
# activates does so by itself.
PROBE = f"""
import os
import sys

{RELEASED}

def told():
    told = {{"pid": os.getpid(), "released": released(), "activated_by": None}}
    if "dynamo_cyclefix" in sys.modules:
        status = sys.modules["dynamo_cyclefix"].status()
        told |= {{"activated_by": status.activated_by, "since": status.since}}
        told["error"] = status.error
        told["applied"] = [p.id for p in status.patches if p.state.in_place]
    return told
"""

PARENT = """
import json
import probe

print(json.dumps(probe.told()))
"""

FAMILY = """
import json
import multiprocessing

import torch
import probe


class Told(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return probe.told()


def alone(items):
    return items[0]


def main():
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    loader = torch.utils.data.DataLoader(Told(), num_workers=1, collate_fn=alone)
    found = {"dataloader": next(iter(loader))}
    for method in "spawn", "forkserver", "fork":
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.apply(probe.told)
    compilers = SubprocPool(1)
    found["compile worker"] = compilers.submit(probe.told).result()
    compilers.shutdown()
    found["parent"] = probe.told()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
"""

RANK = """
import json
import os
import torch.distributed
import probe

torch.distributed.init_process_group("gloo")
told = [None, None]
torch.distributed.all_gather_object(told, probe.told() | {"rank": torch.distributed.get_rank()})
if torch.distributed.get_rank() == 0:
    print(json.dumps(told), flush=True)
torch.distributed.barrier()
# To destroy the group can end in "terminate called without an active exception", without us too.
os._exit(0)
"""


@dataclass(frozen=True)
class Venv:
    """A virtual environment, and a directory with the programs above."""

    folder: Path
    programs: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        scheme = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", scheme))

    def run(
        self,
        *arguments: str | Path,
        code: int = 0,
        env: Mapping[str, str] = {},
        prefix: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run its interpreter in the directory of the programs."""
        return _run(self.python, *arguments, code=code, env=env, cwd=self.programs, prefix=prefix)

    def cli(self, *arguments: str, code: int = 0, **more: Any) -> Any:
        """Run one of our commands."""
        return self.run("-m", "dynamo_cyclefix", *arguments, code=code, **more)


def _run(
    python: str | Path,
    *arguments: str | Path,
    code: int = 0,
    env: Mapping[str, str] = {},
    cwd: Path | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(
        [*prefix, str(python), *map(str, arguments)],
        env=clean_environment() | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished


def clean_environment() -> dict[str, str]:
    ours = "DYNAMO_CYCLEFIX", "PYTHON"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # Nothing but what we write may change a site directory.
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)
    subprocess.run([*pip, str(ROOT)], check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def template(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(install: str) -> Path:
        folder = tmp_path_factory.mktemp("template") / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        if install:
            what = ["--editable", str(ROOT)] if install == "editable" else [str(wheel)]
            pip = sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")
            subprocess.run([*pip, "install", "--quiet", "--no-deps", *what], check=True)
        return folder

    return make


@pytest.fixture
def make_venv(tmp_path: Path, template: Callable[[str], Path]) -> Callable[[str], Venv]:
    def make(install: str) -> Venv:
        folder = tmp_path / "venv"
        shutil.copytree(template(install), folder, symlinks=True)
        programs = tmp_path / "programs"
        programs.mkdir()
        for name, text in ("probe", PROBE), ("parent", PARENT), ("family", FAMILY), ("rank", RANK):
            (programs / f"{name}.py").write_text(text)
        venv = Venv(folder, programs)
        # The packages there, but none of the .pth files there.
        (venv.site / "_torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return venv

    return make


@pytest.fixture
def venv(make_venv: Callable[[str], Venv]) -> Venv:
    return make_venv("wheel")


def by_nothing(venv: Venv, program: str) -> Any:
    return venv.run(f"{program}.py")


def by_import(venv: Venv, program: str) -> Any:
    importing = venv.programs / f"importing_{program}.py"
    importing.write_text("import dynamo_cyclefix\n" + (venv.programs / f"{program}.py").read_text())
    return venv.run(importing)


def by_autostart(venv: Venv, program: str) -> Any:
    venv.cli("autostart", "enable")
    return venv.run(f"{program}.py")


def by_sitecustomize(venv: Venv, program: str) -> Any:
    directory = venv.cli("sitecustomize-dir").stdout.strip()
    return venv.run(f"{program}.py", env={"PYTHONPATH": directory})


def by_existing_sitecustomize(venv: Venv, program: str) -> Any:
    (venv.site / "sitecustomize.py").write_text("import dynamo_cyclefix\n")
    return venv.run(f"{program}.py")


def by_run(venv: Venv, program: str) -> Any:
    return venv.cli("run", f"{program}.py")


WAYS = {
    by_import: "import",
    by_autostart: "autostart",
    by_sitecustomize: "sitecustomize",
    by_existing_sitecustomize: "import",
    by_run: "run",
}


@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_an_installation_alone_activates_nothing(
    make_venv: Callable[[str], Venv], install: str
) -> None:
    told = json.loads(by_nothing(make_venv(install), "parent").stdout)
    assert told["activated_by"] is None
    assert not told["released"]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_way_in_releases_frames_of_an_editable_install(
    make_venv: Callable[[str], Venv], way: Callable[[Venv, str], Any]
) -> None:
    finished = way(make_venv("editable"), "parent")
    told = json.loads(finished.stdout)
    assert told["released"]
    assert told["activated_by"] == WAYS[way]
    assert told["since"]
    assert not told["error"]
    assert "observed-exceptions" in told["applied"]
    assert not finished.stderr


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_parent_and_children_of_a_wheel_have_the_patches(
    venv: Venv, way: Callable[[Venv, str], Any]
) -> None:
    told = json.loads(way(venv, "family").stdout)
    assert len({one["pid"] for one in told.values()}) == len(told)
    # Torch's compile workers run a program of torch's own: an import in the user's does not reach.
    reached = set(told) - ({"compile worker"} if way is by_import else set())
    assert {name: one["released"] for name, one in told.items()} == {
        name: name in reached for name in told
    }
    assert {told[name]["activated_by"] for name in reached} == {WAYS[way]}


@pytest.mark.parametrize("way", ["run", "autostart"])
def test_every_rank_of_torchrun_has_the_patches(venv: Venv, way: str) -> None:
    torchrun = venv.folder / "bin" / "torchrun"
    torchrun.write_text(f"#!{venv.python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "rank.py"]
    if way == "run":
        finished = venv.cli("run", "--", *map(str, command))
    else:
        venv.cli("autostart", "enable")
        finished = venv.run(*command)
    told = json.loads(finished.stdout)
    assert [one["rank"] for one in told] == [0, 1]
    assert [one["released"] for one in told] == [True, True]
    assert [one["activated_by"] for one in told] == [way, way]


def test_off_wins_over_every_way_in(venv: Venv) -> None:
    venv.cli("autostart", "enable")
    told = json.loads(
        venv.cli(
            "run", "parent.py", env={"DYNAMO_CYCLEFIX": "off", "DYNAMO_CYCLEFIX_REPORT": "1"}
        ).stdout
    )
    assert not told["released"]
    assert told["activated_by"] == ""


def test_a_later_import_does_not_change_the_way(venv: Venv) -> None:
    venv.cli("autostart", "enable")
    directory = venv.cli("sitecustomize-dir").stdout.strip()
    program = "import dynamo_cyclefix; print(dynamo_cyclefix.status().activated_by)"
    assert venv.run("-c", program, env={"PYTHONPATH": directory}).stdout == "autostart\n"


# autostart


def test_autostart_says_what_it_writes_and_leaves_no_trace(venv: Venv) -> None:
    before = snapshot(venv.site)
    assert json.loads(venv.cli("autostart", "status", "--json", code=1).stdout) == {
        "outcome": f"not enabled: there is no {venv.site / PTH}",
        "file": str(venv.site / PTH),
        "content": None,
        "enabled": False,
        "new_interpreter": None,
    }
    assert "not enabled" in venv.cli("autostart", "disable").stdout
    assert snapshot(venv.site) == before

    said = venv.cli("autostart", "enable").stdout
    enabled = snapshot(venv.site)
    assert set(enabled) - set(before) == {PTH}
    content = (venv.site / PTH).read_text()
    assert said.startswith(f"wrote {venv.site / PTH}, {len(content)} bytes:\n{content}")
    assert "already enabled" in venv.cli("autostart", "enable").stdout
    assert snapshot(venv.site) == enabled
    status = json.loads(venv.cli("autostart", "status", "--json").stdout)
    assert (status["content"], status["new_interpreter"]) == (content, "autostart")

    assert f"removed {venv.site / PTH}" in venv.cli("autostart", "disable").stdout
    assert snapshot(venv.site) == before


def test_disable_removes_what_was_kept_as_well(venv: Venv) -> None:
    before = snapshot(venv.site)
    venv.cli("autostart", "enable")
    venv.run("parent.py", env={"PYTHONDONTWRITEBYTECODE": ""})
    assert [name for name in snapshot(venv.site) if name.endswith(".kept")]
    assert "files of rewritten code" in venv.cli("autostart", "disable").stdout
    assert snapshot(venv.site) == before


def test_others_may_not_write_what_autostart_wrote(venv: Venv) -> None:
    venv.cli("autostart", "enable", prefix=["sh", "-c", 'umask 0; exec "$0" "$@"'])
    assert stat.S_IMODE((venv.site / PTH).stat().st_mode) == 0o644


def test_disable_removes_what_was_kept_for_another_way_in(venv: Venv) -> None:
    before = snapshot(venv.site)
    assert venv.cli("autostart", "disable").stdout.startswith("not enabled: there is no ")
    program = "from dynamo_cyclefix._catalogue import toml; toml.load()"
    venv.run("-c", program, env={"PYTHONDONTWRITEBYTECODE": ""})
    assert [name for name in snapshot(venv.site) if name.endswith(".kept")]
    said = venv.cli("autostart", "disable").stdout
    assert f"not enabled: there is no {venv.site / PTH}; removed 1 files of rewritten code" in said
    assert snapshot(venv.site) == before


def test_autostart_hears_itself_among_other_hooks(venv: Venv) -> None:
    (venv.site / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "if '-c' in sys.orig_argv: os.write(1, b'\\xffhello')\n"
        "atexit.register(print, 'bye')\n"
    )
    assert "wrote" in venv.cli("autostart", "enable").stdout
    assert "activated by autostart" in venv.cli("autostart", "status").stdout


@pytest.mark.parametrize("content", ["import sys\n", ""])
def test_autostart_leaves_a_file_of_somebody_else(venv: Venv, content: str) -> None:
    (venv.site / PTH).write_text(content)
    for action in "enable", "disable":
        assert "not written by this command" in venv.cli("autostart", action, code=2).stderr
    assert (venv.site / PTH).read_text() == content


def test_autostart_costs_a_bare_interpreter_one_module(venv: Venv) -> None:
    program = "import sys; print(*sorted(sys.modules))"
    before = venv.run("-c", program).stdout.split()
    venv.cli("autostart", "enable")
    ours = {"dynamo_cyclefix"}
    assert set(venv.run("-c", program).stdout.split()) - set(before) == ours


def test_autostart_in_the_user_site(venv: Venv, tmp_path: Path) -> None:
    settings = venv.folder / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace("packages = false", "packages = true"))
    env = {"PYTHONUSERBASE": str(tmp_path / "user")}
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "kept").touch()
    before = snapshot(venv.site)
    said = json.loads(venv.cli("autostart", "enable", "--user", "--json", env=env).stdout)
    assert said["new_interpreter"] == "autostart"
    assert Path(said["file"]).is_relative_to(tmp_path / "user")
    assert "already" in venv.cli("autostart", "enable", "--user", env=env).stdout
    # As another release of ours might have written it.
    file = Path(said["file"])
    file.write_text(file.read_text().replace("import dyn", "import sys, dyn"))
    assert "wrote" in venv.cli("autostart", "enable", "--user", env=env).stdout
    venv.cli("autostart", "disable", "--user", env=env)
    assert snapshot(venv.site) == before
    assert set(snapshot(tmp_path / "user")) == {"kept"}
    # Directories that were there stay, empty or not.
    Path(said["file"]).parent.mkdir(parents=True)
    before = snapshot(tmp_path / "user")
    venv.cli("autostart", "enable", "--user", env=env)
    venv.cli("autostart", "disable", "--user", env=env)
    assert snapshot(tmp_path / "user") == before


def test_autostart_refuses_a_user_site_that_nobody_reads(venv: Venv) -> None:
    said = venv.cli("autostart", "enable", "--user", code=2).stderr
    assert "does not read the user site directory" in said
    assert said.count("\n") == 1


def test_autostart_refuses_a_file_that_activates_nothing(make_venv: Callable[[str], Venv]) -> None:
    venv = make_venv("")
    # The package is found in the current directory, which no start-up looks at.
    shutil.copytree(ROOT / "dynamo_cyclefix", venv.programs / "dynamo_cyclefix")
    before = snapshot(venv.site)
    said = venv.cli("autostart", "enable", code=2).stderr
    assert "is not activated by" in said
    assert "sitecustomize-dir" in said
    assert snapshot(venv.site) == before


def test_autostart_without_site(venv: Venv) -> None:
    env = {"PYTHONPATH": str(ROOT)}
    said = venv.run("-S", "-m", "dynamo_cyclefix", "autostart", "enable", code=2, env=env).stderr
    assert "leave -S out" in said


def read_only(folder: Path) -> list[str]:
    """A command prefix under which ``folder`` is on a read-only file system."""
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, str(folder)]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"]).returncode:
        pytest.skip("read-only mounts need root and `unshare`")
    return prefix


def test_a_read_only_file_system(venv: Venv) -> None:
    prefix = read_only(venv.folder)
    said = venv.cli("autostart", "enable", code=2, prefix=prefix).stderr
    assert f"{venv.site / PTH} cannot be written (Read-only file system)" in said
    venv.cli("autostart", "enable")
    assert "already enabled" in venv.cli("autostart", "enable", prefix=prefix).stdout
    assert "cannot be removed" in venv.cli("autostart", "disable", code=2, prefix=prefix).stderr
    assert json.loads(venv.run("parent.py", prefix=prefix).stdout)["released"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(venv: Venv) -> None:
    venv.site.chmod(0o555)
    try:
        assert "Permission denied" in venv.cli("autostart", "enable", code=2).stderr
    finally:
        venv.site.chmod(0o755)


def test_a_start_survives_an_uninstalled_package_and_says_so(venv: Venv) -> None:
    venv.cli("autostart", "enable")
    shutil.rmtree(venv.site / "dynamo_cyclefix")
    # An editable install of the running interpreter has a directory of that name there.
    (venv.site / "_torch.pth").unlink()
    finished = venv.run("-c", "print('up')")
    assert finished.stdout == "up\n"
    assert f"line 2 of {venv.site / PTH}" in finished.stderr
    assert "No module named 'dynamo_cyclefix'" in finished.stderr


@pytest.mark.parametrize("mode", ["on", "strict"])
@pytest.mark.parametrize("way", ["autostart", "sitecustomize"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_torch_survives_a_damaged_package_and_says_so(
    venv: Venv, damage: str, way: str, mode: str
) -> None:
    env = {}
    if way == "autostart":
        venv.cli("autostart", "enable")
    else:
        env["PYTHONPATH"] = venv.cli("sitecustomize-dir").stdout.strip()
    finder = venv.site / "dynamo_cyclefix" / "_patching" / "activation.py"
    if damage == "missing":
        finder.unlink()
    else:
        finder.write_text(finder.read_text()[:1500] + "(")
    program = "import torch, sys; torch.compile(lambda x: x, backend='eager')(torch.ones(1))"
    finished = venv.run("-c", program, env=env | {"DYNAMO_CYCLEFIX": mode}, code=mode == "strict")
    assert "the installation is damaged" in finished.stderr
    assert ("PatchError" in finished.stderr) is (mode == "strict")
    assert finished.stderr.count("no patch is applied") == 1


def test_a_bug_of_ours_is_red_everywhere(venv: Venv) -> None:
    venv.cli("autostart", "enable")
    gate = venv.site / "dynamo_cyclefix" / "_catalogue" / "gate.py"
    gate.write_text(gate.read_text() + "\n\ndef is_affected(*_):\n    raise RuntimeError('bug')\n")
    env = {"DYNAMO_CYCLEFIX_REPORT": "1"}

    finished = venv.run("parent.py", env=env)
    told = json.loads(finished.stdout)
    assert (told["applied"], told["released"]) == ([], False)
    assert finished.stderr.count("no patch is applied: RuntimeError: bug") == 1
    assert reports(finished)[0]["state"] == "refused"

    finished = venv.cli("status", "--json", code=1)
    status = json.loads(finished.stdout)
    assert (status["active"], status["error"]) == (False, "RuntimeError: bug")
    assert {patch["state"] for patch in status["patches"]} == {"refused"}
    venv.cli("status", "--require", "applied", code=1)
    assert "RuntimeError: bug" in venv.cli("verify", "missing-key", code=1).stderr

    strict = {"DYNAMO_CYCLEFIX": "strict"}
    finished = venv.run("-c", "import torch._dynamo", env=env | strict, code=1)
    assert "PatchError: no patch can be applied (RuntimeError: bug)" in finished.stderr
    assert reports(finished)[0]["state"] == "refused"
    assert "RuntimeError: bug" in venv.cli("verify", "missing-key", code=2, env=strict).stderr


def test_verify_is_red_where_nothing_is_patched(venv: Venv) -> None:
    off = {"DYNAMO_CYCLEFIX_PATCHES": "-observed-exceptions"}
    assert " open\n" in venv.cli("verify", "missing-key", env=off).stdout
    ids = [line.split()[0] for line in venv.cli("status").stdout.splitlines()[1:] if line[0] != " "]
    off = {"DYNAMO_CYCLEFIX_PATCHES": ",".join(f"-{name}" for name in ids)}
    assert "is switched off" in venv.cli("verify", "missing-key", env=off, code=1).stderr


def test_commands_of_a_damaged_package(venv: Venv) -> None:
    venv.cli("autostart", "enable")
    patcher = venv.site / "dynamo_cyclefix" / "_patching" / "patcher.py"
    patcher.write_text(patcher.read_text()[:1500] + "(")
    for command in "status", "diff", "sources":
        said = venv.cli(command, code=2).stderr
        assert "the installation is damaged: SyntaxError" in said, command
    assert "SyntaxError" in venv.cli("verify", "missing-key", code=2).stderr
    (report,) = reports(venv.run("-c", "import torch", env={"DYNAMO_CYCLEFIX_REPORT": "1"}))
    assert report["state"] == "refused"
    assert "SyntaxError" in report["reason"]


def test_a_torch_that_cannot_be_imported(venv: Venv) -> None:
    (venv.programs / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open')\n")
    for command in "status", "diff", "verify":
        said = venv.cli(command, code=2).stderr
        assert "torch cannot be imported" in said, command
        assert "libgomp.so.1: cannot open" in said, command


# Interpreter options


@pytest.mark.parametrize("options", ["-I", "-E", "-s", "-O", "-OO", "-S", "-X importtime"])
def test_options_of_the_interpreter(venv: Venv, options: str) -> None:
    program = "import sys; print('dynamo_cyclefix' in sys.modules)"
    env = {"PYTHONPATH": venv.cli("sitecustomize-dir").stdout.strip()}
    path_is_ignored = options in ("-I", "-E", "-S")
    found = venv.run(*options.split(), "-c", program, env=env).stdout
    assert found == f"{not path_is_ignored}\n"
    venv.cli("autostart", "enable")
    found = venv.run(*options.split(), "-c", program).stdout
    assert found == f"{options != '-S'}\n"


@pytest.mark.parametrize("option", ["-O", "-I"])
def test_frames_are_released_under_an_option(venv: Venv, option: str) -> None:
    venv.cli("autostart", "enable")
    program = f"import sys; sys.path.insert(0, {str(venv.programs)!r}); import parent"
    assert json.loads(venv.run(option, "-c", program).stdout)["released"]


def test_importtime_lists_nothing_heavy(venv: Venv) -> None:
    venv.cli("autostart", "enable")
    lines = venv.run("-X", "importtime", "-c", "pass").stderr.splitlines()
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "dynamo_cyclefix" in names
    heavy = {"torch", "wrapt", "packaging", "typing", "inspect", "ast", "logging", "asyncio"}
    assert not names & heavy


# sitecustomize


def interpreters() -> list[str]:
    """Every CPython of this machine that starts, the supported ones and older ones."""
    found = [sys.executable]
    names = ["python2.7", *(f"python3.{minor}" for minor in range(6, 15))]
    folders = [*os.get_exec_path(), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    for name in names:
        for folder in folders:
            python = shutil.which(name, path=folder)
            if python and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
                found.append(python)
                break
    return found


@pytest.mark.parametrize("python", interpreters())
def test_sitecustomize_runs_the_one_it_shadows(python: str, tmp_path: Path) -> None:
    shadowed = tmp_path / "shadowed"
    shadowed.mkdir()
    (shadowed / "sitecustomize.py").write_text(
        "import sys\nsys.path.append('added')\nwhere = __name__, __file__\n"
    )
    program = """
    import os, sys, sitecustomize
    assert sitecustomize.where[0] == "sitecustomize", sitecustomize.where
    assert sitecustomize.where[1].startswith(sys.argv[1]), sitecustomize.where
    assert "added" in sys.path
    # For children that get their path from here.
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] in sys.path
    loaded = "dynamo_cyclefix" in sys.modules
    assert loaded == (sys.version_info >= (3, 10))
    if loaded:
        assert sys.modules["dynamo_cyclefix"]._active.activated_by == "sitecustomize"
    """
    path = os.pathsep.join([str(ROOT / "dynamo_cyclefix" / "sitecustomize"), str(shadowed)])
    finished = _run(python, "-c", textwrap.dedent(program), shadowed, env={"PYTHONPATH": path})
    assert not finished.stderr


def test_a_shadowed_sitecustomize_fails_as_without_us(venv: Venv) -> None:
    (venv.site / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    program = "import sys; print('sitecustomize' in sys.modules)"
    without = venv.run("-c", program)
    directory = venv.cli("sitecustomize-dir").stdout.strip()
    finished = venv.run("-c", program, env={"PYTHONPATH": directory})
    assert (finished.stdout, finished.stderr) == (without.stdout, without.stderr)
    assert "theirs" in finished.stderr


# Where the package is


def test_a_zipped_package(make_venv: Callable[[str], Venv], wheel: Path) -> None:
    venv = make_venv("")
    env = {"PYTHONPATH": str(wheel)}
    directory = venv.cli("sitecustomize-dir", env=env).stdout.strip()
    assert directory == str(wheel / "dynamo_cyclefix" / "sitecustomize")
    told = json.loads(venv.run("parent.py", env={"PYTHONPATH": directory}).stdout)
    assert told["released"]
    assert told["activated_by"] == "sitecustomize"
    said = venv.cli("autostart", "enable", "--json", env=env).stdout
    assert json.loads(said)["new_interpreter"] == "autostart"


def test_two_copies_on_the_path(venv: Venv, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "second")
    second = tmp_path / "second"
    # The directory belongs to one copy, the path begins with the other.
    directory = str(second / "dynamo_cyclefix" / "sitecustomize")
    program = f"""
    import json, sys
    sys.path.insert(0, {str(venv.site)!r})
    import dynamo_cyclefix
    first = dynamo_cyclefix.__file__
    for name in [n for n in sys.modules if n.startswith("dynamo_cyclefix")]:
        del sys.modules[name]
    import probe
    mixed = probe.released()
    import dynamo_cyclefix
    finders = [f for f in sys.meta_path if type(f).__name__ == "Finder"]
    print(json.dumps([first, mixed, dynamo_cyclefix.__file__, len(finders), probe.told()]))
    """
    path = os.pathsep.join([directory, str(venv.programs)])
    finished = venv.run("-c", textwrap.dedent(program), env={"PYTHONPATH": path})
    first, mixed, later, finders, told = json.loads(finished.stdout)
    assert first == str(second / "dynamo_cyclefix" / "__init__.py")
    assert mixed
    assert later == str(venv.site / "dynamo_cyclefix" / "__init__.py")
    assert finders == 1
    assert told["released"]
    assert "observed-exceptions" in told["applied"]
    assert not finished.stderr


# run

SELF = """
import json, os, sys
ours = os.environ.get("DYNAMO_CYCLEFIX_ACTIVATED_BY") == "run"
path = [entry for entry in sys.path if not entry.endswith(os.path.join("dynamo_cyclefix", "sitecustomize"))]
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": path, "cwd": os.getcwd(), "flags": list(sys.flags),
    "file": os.path.abspath(__file__), "name": __name__, "package": __package__,
    "spec": __spec__ and __spec__.name, "main": main.__dict__ is globals(), "parent": os.getppid(),
}))
sys.exit(7)
"""  # noqa: E501


@pytest.mark.parametrize(
    "command",
    [
        ["itself.py", "one", "--two", "-m", "--", "three"],
        ["-m", "package.itself", "one", "--json", "--", "-h"],
        ["-m", "package", "-x"],
    ],
    ids=lambda command: command[0] + command[1],
)
@pytest.mark.parametrize("options", [[], ["-O", "-Wignore"]], ids=str)
def test_a_program_is_run_as_without_us(venv: Venv, command: list[str], options: list[str]) -> None:
    package = venv.programs / "package"
    package.mkdir()
    for file in venv.programs / "itself.py", package / "itself.py", package / "__main__.py":
        file.write_text(SELF)
    without = json.loads(venv.run(*options, *command, code=7).stdout)
    ours = venv.run(*options, "-m", "dynamo_cyclefix", "run", *command, code=7)
    assert json.loads(ours.stdout) == without
    assert not ours.stderr
    program = venv.run(
        *options, "-m", "dynamo_cyclefix", "run", "--", str(venv.python), *options, *command, code=7
    )
    assert json.loads(program.stdout) == without


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_program(venv: Venv, number: signal.Signals) -> None:
    (venv.programs / "waits.py").write_text(
        "import time\n"
        "try:\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n    raise\n"
    )
    outcomes = []
    for ours in [], ["-m", "dynamo_cyclefix", "run"]:
        child = subprocess.Popen(
            [str(venv.python), *ours, "waits.py"],
            cwd=venv.programs,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        (stdout, stderr), code = child.communicate(), child.returncode
        outcomes.append((stdout, stderr.splitlines()[-1:], code))
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][-1] == -number


def test_a_program_that_is_not_python_dies_of_a_broken_pipe(venv: Venv) -> None:
    shell = "yes | head -n 1; echo ${PIPESTATUS[0]}"
    finished = venv.cli("run", "--", "bash", "-c", shell)
    assert finished.stdout == f"y\n{128 + signal.SIGPIPE}\n"


@pytest.mark.parametrize(
    ("options", "command", "said"),
    [
        (["-I"], ["parent.py"], "ignores PYTHONPATH"),
        (["-E"], ["-m", "parent"], "ignores PYTHONPATH"),
        ([], [], "nothing to run"),
        ([], ["-m"], "nothing to run"),
        ([], ["--"], "nothing to run"),
        ([], ["--", "no-such-program"], "no-such-program cannot be run (No such file or"),
    ],
    ids=str,
)
def test_what_cannot_be_run(venv: Venv, options: list[str], command: list[str], said: str) -> None:
    finished = venv.run(*options, "-m", "dynamo_cyclefix", "run", *command, code=2)
    assert said in finished.stderr
    assert finished.stderr.count("\n") == 1


# status --require applied, and the report


def test_require_applied_asks_a_new_interpreter(venv: Venv) -> None:
    for text in [], ["--json"]:
        finished = venv.cli("status", "--require", "applied", *text, code=1)
        assert "a new interpreter is not activated" in finished.stderr
    assert not json.loads(finished.stdout)["active"]
    # An import in the process that asks is no help.
    assert json.loads(venv.cli("status", "--json").stdout)["activated_by"] == "import"

    venv.cli("autostart", "enable")
    status = json.loads(venv.cli("status", "--require", "applied", "--json").stdout)
    assert status["activated_by"] == "autostart"
    states = {patch["state"] for patch in status["patches"]}
    # Not every patch is for this release.
    assert "applied" in states <= {"applied", "fixed-upstream", "not-affected"}

    off = {"DYNAMO_CYCLEFIX": "off"}
    finished = venv.cli("status", "--require", "applied", code=1, env=off)
    assert "DYNAMO_CYCLEFIX=off" in finished.stderr


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_require_applied_fails_on_a_torch_that_cannot_be_patched(venv: Venv, mode: str) -> None:
    venv.cli("autostart", "enable")
    # Another tool has replaced what we would patch, in every process.
    (venv.site / "sitecustomize.py").write_text(
        "import torch._dynamo.symbolic_convert as module\n"
        "class Replaced: pass\n"
        "module.InstructionTranslatorBase.exception_handler = Replaced()\n"
        if mode == "on"
        else "import torch\ntorch.__version__ = 'nonsense'\n"
    )
    env = {"DYNAMO_CYCLEFIX": mode}
    finished = venv.cli("status", "--require", "applied", code=1, env=env)
    assert ("replaced" if mode == "on" else "nonsense") in finished.stderr


def reports(finished: subprocess.CompletedProcess[str]) -> list[Any]:
    prefix = "dynamo-cyclefix: "
    lines = finished.stderr.splitlines()
    return [json.loads(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)]


def test_a_report_is_one_line_of_json(venv: Venv) -> None:
    env = {"DYNAMO_CYCLEFIX_REPORT": "1"}
    venv.cli("autostart", "enable")

    finished = venv.run("parent.py", env=env)
    told = json.loads(finished.stdout)
    (report,) = reports(finished)
    assert (report["pid"], report["activated_by"]) == (told["pid"], "autostart")
    assert report["state"].startswith("applied")

    (report,) = reports(venv.run("-c", "pass", env=env))
    assert (report["state"], report["activated_by"]) == ("pending", "autostart")

    (report,) = reports(venv.run("-c", "pass", env=env | {"DYNAMO_CYCLEFIX": "off"}))
    assert report["state"] == "disabled"
    assert not reports(venv.run("-c", "pass"))
