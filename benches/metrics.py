"""The lines of a run's metrics.jsonl, while the run writes them."""

import json


def metrics_lines(run):
    """The complete lines of the run in a folder, as objects."""
    found = []
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
