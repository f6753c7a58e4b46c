"""llama.cpp's own HTTP server, from the xllamacpp package.

Owns: its command line. Does not own: anything else. Runs with that package's interpreter:
llama_server.py GGUF PORT THREADS
"""

from __future__ import annotations

import sys
import threading

import xllamacpp as xlc


def main() -> None:
    params = xlc.CommonParams()
    params.model.path = sys.argv[1]
    params.port = int(sys.argv[2])
    params.hostnames = ["127.0.0.1"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
    params.n_parallel = 16
    params.n_ctx = 16 * 1024
    params.kv_unified = True
    server = xlc.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
