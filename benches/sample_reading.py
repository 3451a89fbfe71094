"""The rate at which processes read samples of one data set at the same time, and the CPU time of a sample.

    cargo build --release -p megaburn-data --example read_samples
    python3 benches/sample_reading.py --reader target/release/examples/read_samples --data PREFIX

Each process reads samples in an order of its own for some seconds. Without contention, the rate grows with the number
of processes up to that of the cores, and the CPU time of a sample stays. `benches/large_corpus.py` writes a data set.
"""

import argparse
import os
import subprocess
import threading


def read(command, seed, results):
    """Runs one process; appends its number of samples and its seconds of CPU time."""
    process = subprocess.Popen([*command, str(seed), "5"], stdout=subprocess.PIPE, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{command} ended with {status}"
    results.append((int(output), usage.ru_utime + usage.ru_stime))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--reader", default="target/release/examples/read_samples")
    parser.add_argument("--data", required=True)
    args = parser.parse_args()
    print("| sequence | processes | samples/s | relative to one process | CPU time of a sample |")
    print("|---:|---:|---:|---:|---:|")
    for seq_len in (128, 2048, 8192):
        one = None
        for num_processes in (1, 2, 4, 8, 16):
            if num_processes > max(8, os.cpu_count()):
                break
            results = []
            command = [args.reader, args.data, str(seq_len)]
            threads = [threading.Thread(target=read, args=(command, seed, results)) for seed in range(num_processes)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rate = sum(num_read for num_read, _ in results) / 5
            one = one or rate
            cpu = 1e6 * sum(cpu for _, cpu in results) / sum(num_read for num_read, _ in results)
            print(f"| {seq_len} | {num_processes} | {rate:.0f} | {rate / one:.2f} | {cpu:.2f} µs |", flush=True)


if __name__ == "__main__":
    main()
