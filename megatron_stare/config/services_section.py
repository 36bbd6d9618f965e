"""The section `services`: where the sinks that report to a service find it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_stare.config.performance_section import Section


class ServicesConfig(Section):
    """What the sinks 'wandb', 'mlflow', 'prometheus' and 'webhook' of `observability.sinks` need to know; see
    docs/sinks.md. Secrets do not stand here: they are read from the environment."""

    wandb_project: str = Field("megatron_stare", min_length=1, description="project in W&B")
    wandb_entity: str | None = Field(None, description="user or team in W&B; null: that of the login")
    wandb_mode: Literal["online", "offline"] | None = Field(
        None,
        description="'offline' writes into the run directory, for `wandb sync`. null: as WANDB_MODE says, or online",
    )
    mlflow_uri: str | None = Field(
        None,
        description="tracking server, or file:/folder; null: MLFLOW_TRACKING_URI, or else the folder mlflow of the run "
        "directory",
    )
    mlflow_experiment: str = Field("megatron_stare", min_length=1, description="experiment in MLflow")
    prometheus_host: str = Field(
        "127.0.0.1", min_length=1, description="address that the figures are served at; 0.0.0.0: to every machine"
    )
    prometheus_port: int = Field(9464, ge=1, le=65535, description="port that the figures are served at")
    webhook_env: str = Field(
        "MEGATRON_STARE_WEBHOOK",
        min_length=1,
        description="name of the environment variable that holds the address which alerts are posted to",
    )
    webhook_attempts: int = Field(3, ge=1, description="times that an alert is posted until it is given up")
    webhook_timeout_s: float = Field(10.0, gt=0, description="seconds that the service may take to answer")
    webhook_back_off_s: float = Field(1.0, ge=0, description="seconds before a second attempt, doubled by each")
