"""Settings, their origins, the verbs, and start errors."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from api.app import create_app
from api.cli import main
from api.config import ConfigError, ServeConfig, load
from api.doctor import examine
from api.environment import check_environment
from api.model_folder import ModelFolderError, resolve_model
from api.terminal_chat import Conversation, run
from tests.api.fakes import FakeEngine, served


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "longlens.yaml"
    file.write_text("max-num-seqs: 3\nport: 1111\nhost: 0.0.0.0\n")
    monkeypatch.setenv("LONGLENS_PORT", "2222")
    monkeypatch.setenv("LONGLENS_MAX_NUM_SEQS", "4")
    settings = load({"max_num_seqs": "5"}, file)
    config = settings.config
    assert (config.max_num_seqs, config.port, config.host) == (5, 2222, "0.0.0.0")
    assert config.block_size == 16
    assert settings.origins["max_num_seqs"] == "flag"
    assert settings.origins["port"] == "environment LONGLENS_PORT"
    assert settings.origins["host"] == f"file {file}"
    assert settings.origins["block_size"] == "default"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "32k", 32768),
        ("max_model_len", "131072", 131072),
        ("kv_cache_memory_bytes", "1.5GiB", 3 * 2**29),
        ("kv_cache_memory_bytes", "512M", 2**29),
        ("limit_mm_per_prompt", '{"image": 4}', 4),
        ("limit_mm_per_prompt", "image=7", 7),
        ("allowed_media_domains", "a.example, b.example", ("a.example", "b.example")),
    ],
)
def test_values_as_people_write_them(name: str, text: str, value: object) -> None:
    assert getattr(load({name: text}).config, name) == value


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "99999"}, ["--port", "99999", "65535", "flag"]),
        ({"max_model_len": "lots"}, ["--max-model-len", "lots"]),
        ({"dtype": "float8"}, ["--dtype", "bfloat16"]),
        ({"api_key": "a", "api_key_file": "b"}, ["not both"]),
        ({"limit_mm_per_prompt": '{"video": 1}'}, ["--limit-mm-per-prompt"]),
    ],
)
def test_wrong_values_are_named_with_their_source(flags: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    for word in words:
        assert word in str(caught.value)


def test_unknown_settings_in_a_file_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("max_mdoel_len: 5\n")
    with pytest.raises(ConfigError, match="max-mdoel-len"):
        load({}, file)
    file.write_text("- just\n- a list\n")
    with pytest.raises(ConfigError, match="mapping"):
        load({}, file)
    with pytest.raises(ConfigError, match="not a file"):
        load({}, tmp_path / "missing.yaml")


def test_engine_options_follow_the_flags() -> None:
    flags = {"max_num_seqs": "7", "threads": "2", "mm_encoder_process": False, "dtype": "float16"}
    options = load(flags).config.engine_options("/models/x")
    assert (options.max_num_seqs, options.threads, options.dtype) == (7, 2, "float16")
    assert options.vision_process is False
    assert options.model == "/models/x"


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize("verb", [["serve"], ["chat"], ["config", "show"], ["doctor"], []])
def test_help_is_short(
    verb: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert command(*verb, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert 3 < len(lines) < 40


def test_config_show_names_sources_and_hides_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGLENS_API_KEY", "s3cret")
    assert command("config", "show", "mymodel", "--max-model-len", "8k", "--json") == 0
    text = capsys.readouterr().out
    shown = json.loads(text)
    assert shown["model"] == {"value": "mymodel", "source": "flag"}
    assert shown["max_model_len"] == {"value": 8192, "source": "flag"}
    assert shown["api_key"]["source"] == "environment LONGLENS_API_KEY"
    assert "s3cret" not in text
    assert set(shown) == set(ServeConfig.model_fields)


def test_config_show_is_a_line_per_setting_with_chosen_ones_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LONGLENS_API_KEY", "s3cret")
    file = tmp_path / "longlens.yaml"
    file.write_text("allowed-media-domains: [a.example, b.example]\n")
    flags = ("--max-model-len", "8k", "--config", str(file), "--no-mm-encoder-process")
    assert command("config", "show", *flags) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert {line[0] for line in lines} == set(ServeConfig.model_fields)
    assert len(lines) == len(ServeConfig.model_fields)
    chosen = {line[0]: line[1:] for line in lines[:4]}
    assert chosen["max_model_len"][:2] == ["8192", "flag"]
    assert chosen["mm_encoder_process"][:2] == ["false", "flag"]
    assert chosen["api_key"][:3] == ["(hidden)", "environment", "LONGLENS_API_KEY"]
    assert chosen["allowed_media_domains"][:3] == ["a.example,b.example", "file", str(file)]
    assert {line[2] for line in lines[4:]} == {"default"}
    rest = {line[0]: line for line in lines[4:]}
    assert rest["threads"][1:3] == ["-", "default"]
    assert rest["host"][3:] == ["Address", "to", "listen", "on"]
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LONGLENS_MAX_MDOEL_LEN", "8k", ["LONGLENS_MAX_MDOEL_LEN", "LONGLENS_MAX_MODEL_LEN?"]),
        ("LONGLENS_KV_CACHE_MEMORY", "1", ["no such setting", "LONGLENS_KV_CACHE_MEMORY_BYTES?"]),
        ("longlens_prt", "1", ["longlens_prt", "LONGLENS_PORT?"]),
        ("LONGLENS_COLOUR", "red", ["no such setting", "config show"]),
        ("LONGLENS_PORT", "tcp://10.0.0.9:8000", ["Kubernetes", "enableServiceLinks"]),
    ],
)
@pytest.mark.parametrize("verb", [["serve", "--port", "0"], ["config", "show"]])
def test_variables_that_nothing_reads_are_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
    name: str,
    value: str,
    words: list[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert command(*verb) == 1
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert "Traceback" not in message


def test_variables_that_something_reads_are_taken() -> None:
    fields = {f"LONGLENS_{name.upper()}": "x" for name in ServeConfig.model_fields}
    check_environment({**fields, "LONGLENS_CACHE": "/c", "HOME": "/h", "longlens_host": "x"})
    # The addresses of a service called longlens, or longlens-web, which a pod cannot avoid.
    links = ["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "WEB_PORT"]
    check_environment({f"LONGLENS_{link}": "tcp://10.0.0.9:8000" for link in links})


def test_start_errors_have_a_cause_and_a_remedy_and_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert command("serve", "--port", str(port)) == 1
        message = capsys.readouterr().err
        assert str(port) in message
        assert "--port" in message
    assert command("serve", str(tmp_path / "nothing"), "--port", "0") == 1
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert command("serve", str(tmp_path / "empty"), "--port", "0") == 1
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    assert command("serve", str(tmp_path / "empty"), "--port", "0") == 1
    message = capsys.readouterr().err
    assert "no weights" in message
    assert "tokenizer" not in message
    assert command("serve", "--max-model-len", "many") == 1
    captured = capsys.readouterr()
    assert "--max-model-len" in captured.err
    assert "Traceback" not in captured.err


def test_model_paths(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="no weights"):
        resolve_model(str(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelFolderError, match=r"pickled.*pytorch_model\.bin.*safetensors"):
        resolve_model(str(folder))
    (folder / "model-00001-of-00002.safetensors").touch()
    assert resolve_model(str(folder)) == folder
    (tmp_path / "weights.bin").write_text("x")
    for bad in (str(tmp_path / "weights.bin"), "no such thing", str(tmp_path)):
        with pytest.raises(ModelFolderError):
            resolve_model(bad)


def test_doctor_reports_each_area() -> None:
    names = {finding.name for finding in examine()}
    assert {"python", "cpu", "memory", "torch", "gpu", "cache", "demo model"} <= names
    assert all(finding.remedy for finding in examine() if finding.verdict == "fail")


def test_chat_verb_streams_with_an_image(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    engine = FakeEngine(script="It is [black].")
    app = create_app(ServeConfig(model="tiny"), engine, model_path=folders("qwen2_5_vl"))
    with served(app) as address:
        while app.state.server.status().phase != "ready":
            time.sleep(0.01)
        assert command("chat", "What?", "--url", address, "--image", str(tmp_path / "a.png")) == 0
        out = capsys.readouterr().out
        assert "It is [black]." in out
        assert "first token" in out
        assert len(engine.seen[0].media) == 1
        conversation = Conversation(address)
        for question in ("one", "two"):
            assert run(conversation, Console(), question) == 0
        assert len(conversation.messages) == 4
        assert command("chat", "What?", "--url", address, "--max-tokens", "0") == 1
        assert "max_tokens" in capsys.readouterr().out
    assert command("chat", "x", "--url", "http://127.0.0.1:9") == 1
    assert "longlens serve" in capsys.readouterr().out
    assert command("chat", "x", "--image", str(tmp_path / "none.png")) == 1


def test_the_api_process_does_not_import_torch() -> None:
    code = (
        "import sys, api.app, api.serve, api.cli, lm_engine.process.client; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
