"""GRPO with rollouts from the codes of training."""

import pytest

from octavo.examples.grpo import main, train

pytestmark = pytest.mark.standard_promotion


@pytest.mark.slow
def test_a_policy_in_int8_learns_from_its_own_codes():
    history = train("int8", steps=60, log=None)
    first, last = (sum(row["reward"] for row in rows) / 10 for rows in (history[:10], history[-10:]))
    assert last > first + 0.2
    assert sorted(row["k3"] for row in history)[30] < 1e-9


@pytest.mark.slow
def test_the_command_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["grpo", "--mode", "float", "--steps", "2", "--out", str(tmp_path)])
    main()
    assert "trained and sampled in float32" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts.json", "report.html"}
    assert "counting on by GRPO" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_float_training_with_int8_rollouts_is_another_policy():
    assert train("rollout", steps=1, log=None)[0]["k3"] > 1e-5
