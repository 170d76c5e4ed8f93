"""TorchServe's configuration: loopback only, keys required, one archive, short logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 256 * 1024**2
"""Largest request and response; a larger response would kill the worker."""
LOGGING = """\
<Configuration>
  <Appenders>
    <File name="server" fileName="{folder}/server.log"><PatternLayout pattern="%m%n"/></File>
    <File name="model" fileName="{folder}/model.log"><PatternLayout pattern="%m%n"/></File>
  </Appenders>
  <Loggers>
    <Logger name="MODEL_LOG" level="info" additivity="false"><AppenderRef ref="model"/></Logger>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="TS_METRICS" level="off"/>
    <Logger name="ACCESS_LOG" level="off"/>
    <Root level="info"><AppenderRef ref="server"/></Root>
  </Loggers>
</Configuration>
"""


def configuration(mar: Path, ports: list[int]) -> str:
    """Return ``config.properties`` for one archive and five ports."""
    settings: dict[str, Any] = {
        "inference_address": f"http://127.0.0.1:{ports[0]}",
        "management_address": f"http://127.0.0.1:{ports[1]}",
        "metrics_address": f"http://127.0.0.1:{ports[2]}",
        "grpc_inference_address": "127.0.0.1",
        "grpc_management_address": "127.0.0.1",
        "grpc_inference_port": ports[3],
        "grpc_management_port": ports[4],
        "disable_token_authorization": "false",
        "token_expiration_min": 525600,
        "enable_model_api": "false",
        "allowed_urls": "none://disabled",
        "load_models": mar.name,
        "decode_input_request": "false",
        "max_request_size": MAX_BYTES,
        "max_response_size": MAX_BYTES,
        "number_of_gpu": 0,
        "disable_system_metrics": "true",
        "metrics_mode": "prometheus",
        "install_py_dep_per_model": "false",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())
