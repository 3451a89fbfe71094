"""The numbers of a run's metrics.jsonl by the names that its logs for other programs have."""

import json
import math

ABOUT = {"step", "wall_time", "start_number", "data"}


def numbers(name, value):
    """The numbers of a field, those inside of others by their path."""
    if value is None:
        yield name, math.nan
    elif isinstance(value, (bool, int, float)):
        yield name, float(value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(f"{name}/{index}", item)
    elif isinstance(value, dict):
        for field, item in value.items():
            yield from numbers(f"{name}/{field}", item)


def values_of(path):
    """Step, name, number and time of all values in a file."""
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "step" not in record or not ("loss" in record or "eval_loss" in record):
            continue
        data = record.get("data")
        prefix = "train/" if "loss" in record else f"eval/{data}/" if data else "eval/"
        for field in record.keys() - ABOUT:
            for name, value in numbers(field.removeprefix("eval_"), record[field]):
                yield record["step"], prefix + name, value, record.get("wall_time")
