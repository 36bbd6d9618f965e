"""What takes down what a run reports: a file each, and each a Sink (`observability/sink.py` is the contract).

A user's own is one file, named in YAML by its dotted path (`observability.sinks`).
"""

SINKS = {
    "console": "megatron_stare.observability.sinks.console.Console",
    "jsonl": "megatron_stare.observability.sinks.jsonl_files.JsonlFiles",
    "tensorboard": "megatron_stare.observability.sinks.tensorboard.TensorBoard",
    "report": "megatron_stare.observability.sinks.report_page.ReportPage",
    "wandb": "megatron_stare.observability.sinks.weights_and_biases.WeightsAndBiases",
    "mlflow": "megatron_stare.observability.sinks.mlflow_runs.MlflowRuns",
    "prometheus": "megatron_stare.observability.sinks.prometheus_endpoint.PrometheusEndpoint",
    "webhook": "megatron_stare.observability.sinks.webhook.Webhook",
}
