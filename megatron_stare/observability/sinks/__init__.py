"""What takes down what a run reports: a file each, and each a Sink (`observability/sink.py` is the contract).

A user's own is one file, named in YAML by its dotted path (`observability.sinks`).
"""

SINKS = {
    "console": "megatron_stare.observability.sinks.console.Console",
    "jsonl": "megatron_stare.observability.sinks.jsonl_files.JsonlFiles",
    "tensorboard": "megatron_stare.observability.sinks.tensorboard.TensorBoard",
    "report": "megatron_stare.observability.sinks.report_page.ReportPage",
}
