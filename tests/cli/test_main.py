"""The command line as a user meets it: exit codes, one-sentence errors, output that other programs can read."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deepinfer_sm80 import __version__, cli
from deepinfer_sm80.errors import UnknownOpError
from deepinfer_sm80.ops import OPS


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"deepinfer-sm80 {__version__}\n"


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([])
    assert done.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    assert f"deepinfer-sm80 {command}" in capsys.readouterr().out


def test_an_error_is_one_sentence_and_code_2(monkeypatch, capsys):
    def run(args):
        raise UnknownOpError(op="nope", known="a, b")

    monkeypatch.setattr("deepinfer_sm80.cli.env.run", run)
    assert cli.main(["env"]) == 2
    caught = capsys.readouterr()
    assert caught.err == "deepinfer-sm80 env: No operator 'nope'. Known operators: a, b.\n"
    assert caught.out == ""


def test_a_fault_of_ours_is_not_hidden(monkeypatch):
    def run(args):
        raise ZeroDivisionError

    monkeypatch.setattr("deepinfer_sm80.cli.env.run", run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["env"])


def test_interrupt(monkeypatch):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepinfer_sm80.cli.env.run", run)
    assert cli.main(["env"]) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_cleans_up(monkeypatch, number):
    """``docker stop`` and a closed terminal, not Ctrl-C alone."""
    cleaned = []

    def run(args):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # impatience does not interrupt the clean-up
            cleaned.append(True)

    monkeypatch.setattr("deepinfer_sm80.cli.env.run", run)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert cli.main(["env"]) == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # as nohup does
        monkeypatch.setattr("deepinfer_sm80.cli.env.run", lambda args: signal.raise_signal(number) or 0)
        assert cli.main(["env"]) == 0
    finally:
        signal.signal(number, before)
    assert cleaned == [True]


def test_reader_that_stops_early():
    """As in `deepinfer-sm80 ops | head -1`: no traceback when the pipe closes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "deepinfer_sm80.cli", "ops"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_ops_lists_all_of_them_in_order(capsys):
    assert cli.main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[family, op] for op, family in OPS.items()]
    assert all(len(line.split()) > 4 for line in lines), "each with its summary"


def test_ops_lists_without_torch():
    code = "import sys; sys.modules['torch'] = None\nfrom deepinfer_sm80.cli import main\nsys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def run(*args):
        return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment)

    assert run("ops").returncode == 0
    needs_torch = run("ops", "--json")
    assert needs_torch.returncode == 2
    assert "needs torch, which is not installed" in needs_torch.stderr
    assert "Traceback" not in needs_torch.stderr


def test_ops_json(capsys):
    assert cli.main(["ops", "--json"]) == 0
    found = {entry["op"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(found) == list(OPS)
    insert = found["rope_quant_insert"]
    assert (insert["returns"], insert["writes"], insert["tolerance"]) == ([], ["kv_cache"], {"kv_cache": "exact"})


def test_resources_without_triton(monkeypatch, capsys):
    monkeypatch.setattr("deepinfer_sm80.cli.needs.find_spec", lambda name: None)
    assert cli.main(["ops", "--resources", "--json"]) == 2
    assert "ops --resources needs triton, which is not installed" in capsys.readouterr().err


def test_env_shows_values_in_force(monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_FORCE", "1")
    monkeypatch.setenv("DEEPINFER_PYTORCH_OPERATORS", "indexer_topk")
    monkeypatch.delenv("DEEPINFER_DISABLE", raising=False)
    assert cli.main(["env"]) == 0
    values = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert values == {"DEEPINFER_DISABLE": "0", "DEEPINFER_FORCE": "1", "DEEPINFER_PYTORCH_OPERATORS": "indexer_topk"}
    monkeypatch.setenv("DEEPINFER_FORCE", "on")
    assert cli.main(["env"]) == 2
    assert "DEEPINFER_FORCE must be 0 or 1, got 'on'" in capsys.readouterr().err


def test_env_warns_of_a_variable_that_nothing_reads(monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_TYPO", "1")
    assert cli.main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("warning: unknown variable DEEPINFER_TYPO; known are ")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["demo"], "demo"),
        (["verify"], "verify"),
        (["sensitivity", "tiny"], "sensitivity"),
        (["bench", "mhc"], "bench"),
        (["ops"], None),
        (["doctor"], None),
    ],
)
def test_a_variable_with_an_impossible_value_stops_what_runs_operators(monkeypatch, capsys, command, module):
    ran = []
    for name in ("demo", "verify", "sensitivity", "bench", "ops", "doctor"):
        monkeypatch.setattr(f"deepinfer_sm80.cli.{name}.run", lambda args: ran.append(args.command) or 0)
    monkeypatch.setenv("DEEPINFER_PYTORCH_OPERATORS", "foo")
    assert cli.main(command) == (2 if module else 0)
    assert ran == ([] if module else command)
    assert ("DEEPINFER_PYTORCH_OPERATORS" in capsys.readouterr().err) is bool(module)


def test_run_gets_the_parsed_arguments(monkeypatch):
    seen = SimpleNamespace(args=None)
    monkeypatch.setattr("deepinfer_sm80.cli.demo.run", lambda args: setattr(seen, "args", args) or 0)
    assert cli.main(["demo", "--device", "cpu", "--dir", "x"]) == 0
    assert (seen.args.device, str(seen.args.dir)) == ("cpu", "x")


def test_no_error_begins_with_the_command_that_is_printed_before_it():
    from deepinfer_sm80 import errors

    templates = [kind.template for kind in vars(errors).values() if hasattr(kind, "template")]
    assert len(templates) > 10
    words = [template.partition(" ")[0] for template in templates]
    assert not [word for word in words if word.endswith(":") and word.lower().startswith(tuple(cli.COMMANDS))]
