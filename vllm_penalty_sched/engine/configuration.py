"""Find the plugin's settings in a vLLM configuration."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
from vllm.platforms import current_platform

from vllm_penalty_sched.engine.learned_state import load_state
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.learning.latency import StepTimeModel, load_model
from vllm_penalty_sched.learning.model_state import Provenance
from vllm_penalty_sched.settings import KEY, Settings, inert_settings, settings_in_json

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm.penalty_sched")


def read_settings(vllm_config: VllmConfig) -> Settings:
    """Return the settings under ``penalty_sched`` of ``additional_config``, or the defaults.

    Those that do nothing beside the others are told in the log, a line each.

    Raises:
        ConfigError: If any setting is wrong or the file cannot be read.
    """
    config = vllm_config.additional_config
    source = config.get(KEY, {}) if isinstance(config, dict) else {}
    if isinstance(source, str):
        text = _read_text(source)
        settings = Settings.from_json(text, source=source)
        source = settings_in_json(text, source=source)
    else:
        settings = Settings.from_mapping(source)
    for line in inert_settings(source):
        log.warning("%s setting %s", KEY, line)
    return settings


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # such as a path with a null byte, or no UTF-8
        raise ConfigError(f"{KEY} settings: cannot read {path}: {error}") from error


def ranked_path(path: str, rank: int) -> str:
    """Return a path of its own for each data-parallel rank: the first keeps the given name."""
    if rank == 0:
        return path
    name = Path(path)
    if not name.suffix:  # a trace's <name>.1 is the rotated one
        return f"{path}-{rank}"
    return str(name.with_name(f"{name.stem}.{rank}{name.suffix}"))


def read_provenance(vllm_config: VllmConfig) -> Provenance:
    """Return where this engine's steps run."""
    device = str(current_platform.get_device_name())
    if current_platform.is_cpu():
        device = f"{device}, {platform.machine()}, {os.cpu_count()} cores"
    return Provenance(
        hardware=device,
        model=str(vllm_config.model_config.model),
        vllm_version=str(vllm.__version__),
    )


def read_model(settings: Settings, vllm_config: VllmConfig) -> StepTimeModel:
    """Return the model to start with: this engine's saved state, else the one named, else new.

    Raises:
        ModelFileError: If the settings name a model that cannot be used.
    """
    provenance = read_provenance(vllm_config)
    model = None
    if settings.state_path:
        rank = vllm_config.parallel_config.data_parallel_index
        model = load_state(ranked_path(settings.state_path, rank), provenance)
    if model is None:
        model = load_model(settings.model) if settings.model else StepTimeModel()
    model.provenance = provenance
    return model
