"""What the operator chose, and where each value came from.

Owns: ServeConfig, the one model of all settings; its sources in order flag > environment
(LONGLENS_*) > YAML (--config) > default; and the translation into EngineOptions.
Does not own: parsing the command line (cli.py), or what "auto" becomes (the engine reports it).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from chunked_prefill.settings import LONG_PROMPT_SHARE, STEP_SHARE
from lm_engine.options import ColdKV, EngineOptions
from vision_encoder.media import MAX_PIXELS, MediaLimits

ENV_PREFIX = "LONGLENS_"
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_SHORTEST_PROMISE_S = 1e-3
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


class ConfigError(Exception):
    """A setting cannot be used; the message names it, its source and the remedy."""


def number(value: Any) -> Any:
    """`32k` -> 32768, `1.5GiB` -> 1610612736; units are powers of 1024. Others pass through."""
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        exact = float(match[1]) * _UNITS[match[2].lower()]
        if exact == int(exact):
            return int(exact)
        raise ValueError(f"{value} is not a whole number")
    return value


def _seconds(value: Any) -> Any:
    """`200ms` -> 0.2, `0.2s` -> 0.2; a bare number is refused, since either unit is plausible."""
    if value == 0 or value == "0":
        return 0.0
    text = str(value).strip().lower()
    if match := _DURATION.fullmatch(text):
        seconds = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)
        if seconds < _SHORTEST_PROMISE_S:
            raise ValueError(f"{value} is shorter than any step; write 1ms or more, or 0 for none")
        return seconds
    if re.fullmatch(r"\d+(\.\d+)?", text):
        raise ValueError(f"{value} lacks its unit; write {text}ms or {text}s (0 for no promise)")
    raise ValueError(f"{value!r} is no duration; write 200ms or 0.2s (0 for no promise)")


def _shares(value: Any) -> Any:
    """`0.3-0.9`, or `0.7` for both."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        least, dash, most = str(value).partition("-")
        try:
            value = (float(least), float(most if dash else least))
        except ValueError:
            raise ValueError(f"{value!r} is no range of shares; write 0.3-0.9") from None
    if isinstance(value, list | tuple) and len(value) == 2 and not 0 < value[0] <= value[1] <= 1:
        raise ValueError("shares lie above 0 and at most at 1, the least first; write 0.3-0.9")
    return value


def _folder(value: Any) -> Any:
    """An empty name, as of an environment variable that is not set, would be the working folder."""
    if value == "":
        raise ValueError("an empty name is no folder; name one, or leave it out")
    return value


def _words(value: Any) -> Any:
    """A comma-separated list, as flags and environment variables write it."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


def _image_limit(value: Any) -> Any:
    """`4`, `image=4` or `{"image": 4}`."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if isinstance(value, Mapping):
        if set(value) != {"image"}:
            raise ValueError('only images can be limited: use {"image": N}')
        return value["image"]
    return value.removeprefix("image=") if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(number)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Shares = Annotated[tuple[float, float], BeforeValidator(_shares)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


def _setting(help_text: str, default: Any = None, *, core: bool = False, **limits: Any) -> Any:
    """`core` settings are listed by `serve --help`; all are listed by `config show`."""
    return Field(default=default, description=help_text, json_schema_extra={"core": core}, **limits)


_DEMO_KV_BYTES = 192 << 20
"""4,368 tokens: with weights and processes the demo stays below 1.6 GB."""


class ServeConfig(BaseSettings):
    """All settings of `longlens serve`. Flag names are those of vLLM where it has the setting."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        enable_decoding=False,
    )

    model: str = _setting("Folder, GGUF file or hub id", "demo", core=True)
    tokenizer: str | None = _setting("Folder of the tokenizer, instead of the model's own")
    served_model_name: str | None = _setting("Name that clients use", core=True)
    chat_template: Path | None = _setting("Jinja file instead of the model's own", core=True)
    host: str = _setting("Address to listen on", "127.0.0.1", core=True)
    port: int = _setting("Port to listen on", 8000, core=True, ge=0, le=65535)
    api_key: str | None = _setting("Key that clients must send", core=True)
    api_key_file: Path | None = _setting("File of `key tenant` lines", core=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto, float32, bfloat16 or float16", "auto", core=True
    )
    device: str = _setting("auto, cpu, cuda or cuda:N", "auto", core=True)
    threads: int | None = _setting("CPU threads", core=True, ge=1)
    max_model_len: Count | None = _setting("Context in tokens, 32k = 32768", core=True, ge=1)
    max_num_seqs: Count = _setting("Sequences that run at once", 64, core=True, ge=1)
    max_num_batched_tokens: Count = _setting("Token budget of one step", 512, core=True, ge=1)
    tpot_slo: Seconds | None = _setting(
        "Time per output token to keep while prompts prefill, 200ms say", core=True, ge=0
    )
    ttft_slo: Seconds | None = _setting(
        "Time to the first token to keep, 2s say; longer prompts get more", core=True, gt=0
    )
    scheduling_policy: Literal["deadline", "fcfs"] = _setting(
        "deadline or fcfs: whose prompt goes first", "deadline"
    )
    step_share: Shares = _setting(
        "Least and most of --tpot-slo that a step with prompts may plan for", STEP_SHARE
    )
    long_prompt_share: float = _setting(
        "Of the KV pool, what long prompts may hold while short ones wait",
        LONG_PROMPT_SHARE,
        gt=0,
        le=1,
    )
    allow_tuning: bool = _setting("Let /v1/scheduling change these while serving", False)
    block_size: Count = _setting("Tokens in a KV block", 16, ge=1)
    kv_cache_memory_bytes: Count | None = _setting("KV pool, 4GiB say", core=True, ge=1)
    host_kv_gib: float | None = _setting(
        "GiB of host memory for contexts and prompts beyond the KV pool",
        core=True,
        gt=0,
        le=2**20,
        allow_inf_nan=False,
    )
    disk_kv_path: Annotated[Path | None, BeforeValidator(_folder)] = _setting(
        "Folder that keeps prompts' KV over a restart; needs --host-kv-gib", core=True
    )
    disk_kv_gib: float = _setting(
        "GiB that this folder may take", 16.0, core=True, gt=0, le=2**20, allow_inf_nan=False
    )
    cold_kv: ColdKV = _setting(
        "auto, cpu (where it lies) or stream (brought to the device): how KV on the host is "
        "attended",
        "auto",
        core=True,
    )
    enable_prefix_caching: bool = _setting("Reuse the KV of equal beginnings", True, core=True)
    kv_events: bool = _setting(
        "Publish at /v1/kv/events what the prefix cache holds", False, core=True
    )
    calibrate: bool = _setting(
        "Measure step times before serving, unless that was done before", False, core=True
    )
    record: Path | None = _setting("Write every scheduling decision into this new file")
    embedding_rows: Count | None = _setting("Rows of the image embedding arena", ge=1)
    mm_encoder_process: bool = _setting("Vision stage in its own process", True)

    limit_mm_per_prompt: Annotated[int, BeforeValidator(_image_limit)] = _setting(
        "Most images in one request", 32, core=True, ge=0
    )
    allowed_local_media_path: Path | None = _setting("Folder that file: URLs may read", core=True)
    allowed_media_domains: Words = _setting("Hosts that image URLs may name", (), core=True)
    max_image_bytes: Count = _setting("Encoded bytes of one image", 32 * 2**20, ge=1)
    max_image_pixels: Count = _setting("Pixels of one image", 50_000_000, ge=1, le=MAX_PIXELS)
    image_resolution_limit: Count | None = _setting(
        "Pixels of an image that the model sees; larger ones are scaled down", ge=1
    )
    max_request_pixels: Count = _setting("Pixels of a request's images", 400_000_000, ge=1)
    max_image_frames: Count = _setting("Frames of an animated image", 1000, ge=1)
    max_image_aspect: float = _setting("Longer edge over shorter edge", 200.0, ge=1)
    media_timeout_s: float = _setting("Seconds for fetching an image", 10.0, gt=0)

    max_body_bytes: Count = _setting("Size of one request body", 128 * 2**20, ge=1024)
    max_queued_requests: Count = _setting("Requests that may wait", 256, core=True, ge=0)
    max_queued_tokens: Count = _setting("Prompt tokens in flight", 4 * 2**20, ge=1)
    max_queued_media_bytes: Count = _setting("Body and image bytes in flight", 2**30, ge=1)
    max_tenant_requests: Count | None = _setting("Requests in flight per API key", ge=1)
    drain_timeout_s: float = _setting("Seconds for running requests at SIGTERM", 60.0, ge=0)
    keepalive_s: float = _setting("Seconds between comments in a silent stream", 10.0, gt=0)

    metrics_prefix: str = _setting("Prefix of metric names", "vllm:", pattern="^[a-zA-Z_:]*$")
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "debug, info, warning or error", "info", core=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `load` merges the sources itself, to know each value's origin."""
        return (init_settings,)

    @model_validator(mode="after")
    def _one_kind_of_key(self) -> ServeConfig:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("use api_key or api_key_file, not both")
        return self

    @model_validator(mode="after")
    def _tiers_behind_each_other(self) -> ServeConfig:
        if self.disk_kv_path is not None and self.host_kv_gib is None:
            raise ValueError(
                "--disk-kv-path needs host memory, through which its KV comes and goes: add "
                "--host-kv-gib 1 or more"
            )
        if "disk_kv_gib" in self.model_fields_set and self.disk_kv_path is None:
            raise ValueError(
                "--disk-kv-gib bounds the folder of --disk-kv-path: name that, or leave "
                "--disk-kv-gib out"
            )
        if self.cold_kv != "auto" and self.host_kv_gib is None:
            raise ValueError(
                f"--cold-kv {self.cold_kv} says how KV on the host is attended: add "
                "--host-kv-gib 1 or more, or leave --cold-kv out"
            )
        return self

    @model_validator(mode="after")
    def _events_of_a_cache(self) -> ServeConfig:
        if self.kv_events and not self.enable_prefix_caching:
            raise ValueError("kv_events tells what the prefix cache holds: enable_prefix_caching")
        return self

    @model_validator(mode="after")
    def _record_one_level(self) -> ServeConfig:
        if self.record is not None and self.host_kv_gib is not None:
            raise ValueError("record does not know when copies end: leave out host_kv_gib")
        return self

    @property
    def public_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.model).name or self.model

    def media_limits(self) -> MediaLimits:
        return MediaLimits(
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
            max_aspect=self.max_image_aspect,
            max_frames=self.max_image_frames,
            # Zero images are refused before any header is read.
            max_images=max(1, self.limit_mm_per_prompt),
            max_total_pixels=self.max_request_pixels,
        )

    @property
    def _default_kv_bytes(self) -> int | None:
        """The demo runs beside other things, and the prefix cache fills any pool in time."""
        return _DEMO_KV_BYTES if self.model == "demo" else None

    def engine_options(self, model: str) -> EngineOptions:
        """`model`: the folder or file that `self.model` was resolved to."""
        return EngineOptions(
            model=model,
            tokenizer=self.tokenizer,
            served_name=self.public_name,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tpot_slo_s=self.tpot_slo,
            ttft_slo_s=self.ttft_slo,
            scheduling_policy=self.scheduling_policy,
            step_share=self.step_share,
            long_prompt_share=self.long_prompt_share,
            block_size=self.block_size,
            prefix_caching=self.enable_prefix_caching,
            kv_memory_bytes=self.kv_cache_memory_bytes or self._default_kv_bytes,
            host_kv_bytes=None if self.host_kv_gib is None else int(self.host_kv_gib * 2**30),
            disk_kv_path=None if self.disk_kv_path is None else str(self.disk_kv_path),
            disk_kv_bytes=int(self.disk_kv_gib * 2**30),
            kv_events=self.kv_events,
            calibrate=self.calibrate,
            record=None if self.record is None else str(self.record.absolute()),
            cold_kv=self.cold_kv,
            embedding_rows=self.embedding_rows,
            threads=self.threads,
            vision_process=self.mm_encoder_process,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """A ServeConfig, and for each field the source of its value."""

    config: ServeConfig
    origins: dict[str, str]


def load(flags: Mapping[str, Any], config_file: Path | None = None) -> Settings:
    """Merges all sources. `flags` holds only what was given on the command line.

    Raises ConfigError naming the setting and where its value came from.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, values in (
        (f"file {config_file}", _from_file(config_file)),
        ("environment", EnvSettingsSource(ServeConfig)()),
        ("flag", flags),
    ):
        for name, value in values.items():
            merged[name] = value
            origins[name] = source
            if source == "environment":
                origins[name] = f"environment {ENV_PREFIX}{name.upper()}"
    try:
        config = ServeConfig(**merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None
    for name in ServeConfig.model_fields:
        origins.setdefault(name, "default")
    return Settings(config, origins)


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigError(f"--config: {path} is not a file.")
    try:
        values = YamlConfigSettingsSource(ServeConfig, yaml_file=path)()
    except Exception as error:
        # The YAML package is not imported here, so its error type has no name.
        raise ConfigError(f"--config: {path} is not a YAML mapping of settings.") from error
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for fault in error.errors(include_url=False, include_context=False):
        name = str(fault["loc"][0]) if fault["loc"] else ""
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = _no_such_setting(name)
        flag = f"--{name.replace('_', '-')}"
        where = f" (from {origins[name]})" if name in origins else ""
        given = f" is {fault['input']!r}" if name and name != "api_key" else ""
        lines.append(f"{flag}{given}{where}: {message}." if name else f"{message}.")
    return "\n".join(lines)


def _no_such_setting(name: str) -> str:
    near = difflib.get_close_matches(name, ServeConfig.model_fields, 1)
    hint = f"did you mean {near[0].replace('_', '-')}? " if near else ""
    return f"there is no such setting; {hint}`longlens config show` lists all"
