"""``python -m beaconscope.reasoner``: problems that ``record --prompts`` reads."""

from beaconscope.reasoner import SIZES, read_problem, solve
from beaconscope.reasoner.__main__ import main
from beaconscope.record.prompts import read_prompts


def test_problems_are_prompts_with_their_answers(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["reasoner", "--size", "250", "--count", "3", "--seed", "7"])
    main()
    path = tmp_path / "problems.jsonl"
    path.write_text(capsys.readouterr().out)
    prompts = read_prompts(path)
    assert [prompt.id for prompt in prompts] == ["250-0", "250-1", "250-2"]
    for prompt in prompts:
        problem = read_problem(prompt.prompt)
        assert problem.size == SIZES["250"]
        assert prompt.answer == str(solve(problem).answer)
