"""Compares the event files of a run with its metrics.jsonl, as TensorBoard reads them.

    pip install tensorboard
    python tests/tools/tensorboard_logs.py RUN

Prints each tag with its number of values, and ends with 1 if a value differs.
"""

import math
import struct
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from log_values import values_of

def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def expected(path):
    """The values of each tag by step."""
    tags = {}
    for step, tag, value, time in values_of(path):
        tags.setdefault(tag, []).append((step, single(value), time))
    return tags


def main(run):
    wanted = expected(run / "metrics.jsonl")
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = found.Tags()["scalars"]
    assert set(tags) == set(wanted), set(tags) ^ set(wanted)
    for tag in sorted(tags):
        events = found.Scalars(tag)
        same = len(events) == len(wanted[tag]) and all(
            event.step == step
            and (event.value == value or math.isnan(event.value) and math.isnan(value))
            and (time is None or event.wall_time == time)
            for event, (step, value, time) in zip(events, wanted[tag])
        )
        print(f"{tag}: {len(events)} values, steps {events[0].step} to {events[-1].step}, {'equal' if same else 'DIFFERENT'}")
        assert same, (tag, events[:3], wanted[tag][:3])
    print(f"tensorboard reads {len(tags)} tags as metrics.jsonl has them")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
