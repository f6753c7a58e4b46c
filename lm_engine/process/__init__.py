"""The stages as processes of their own, supervised, behind an asyncio client (DESIGN §3).

    API process (no torch)             client.py       asyncio face: EngineClient
        │ control: reports, channels   wire.py         frames, messages
        ▼                              board.py        heartbeats in shared memory
    supervisor (one import of torch)   supervisor.py   forks, watches, restarts
        ├── language stage             language.py     the engine's loop
        │       │ link: jobs, replies  link.py         VisionLink over a socket
        └── vision stage               vision.py       the loop around a VisionStage

The API process talks to the language stage over a socket of their own; the supervisor is not in
the way of requests. All sockets are unnamed pairs that are inherited or passed along, so nobody
else can connect and nothing is left behind. Linux only; `Engine` used directly needs none of this.

`from lm_engine.process.client import start` is the way in, and imports no torch.
"""
