"""What the README lists as a known limit is still one: when a test here fails, README is wrong."""

from conftest import run_child


def test_a_resume_function_holds_what_a_graph_break_returned():
    finished = run_child(
        """
        import json
        from dynamo_cyclefix import audit
        import torch

        @torch.compiler.disable
        def make_error():
            return ValueError("made outside of the graph")

        @torch.compile(backend="eager")
        def check(x):
            x = x + 1
            raise make_error()

        (cycle,) = audit.run(check, torch.ones(2)).cycles
        print(json.dumps([cycle.owner, cycle.kind, cycle.name, cycle.function.split("_at_")[0]]))
        """
    )
    owner, kind, name, function = finished.json
    assert (kind, name) == ("local", "___stack0")
    assert function.endswith("torch_dynamo_resume_in_check")
    assert owner == "torch"
