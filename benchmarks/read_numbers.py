"""Twenty pictures of printed numbers, asked through the openai SDK, streamed.

Owns: the count of answers that contain their number. Does not own: the server, or training. Runs
with any environment that has openai 2 or 3:

python benchmarks/read_numbers.py [URL]
"""

from __future__ import annotations

import base64
import sys
import time
from pathlib import Path

import openai

PICTURES = Path(__file__).parents[1] / "tests" / "data" / "numbers"
QUESTION = "What number is written in the image?"
KINDS = {".png": "png", ".jpg": "jpeg", ".webp": "webp"}


def ask(client: openai.OpenAI, picture: Path) -> tuple[str, float]:
    """The streamed answer and the seconds to its first text."""
    data = base64.b64encode(picture.read_bytes()).decode()
    url = f"data:image/{KINDS[picture.suffix]};base64,{data}"
    begin = time.perf_counter()
    stream = client.chat.completions.create(
        model="demo",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": QUESTION},
                ],
            }
        ],
        temperature=0,
        max_tokens=48,
        stream=True,
    )
    answer, first_s = "", 0.0
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text and not answer:
            first_s = time.perf_counter() - begin
        answer += text or ""
    return answer, first_s


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    pictures = sorted(PICTURES.iterdir())
    right, waits = 0, []
    for picture in pictures:
        answer, first_s = ask(client, picture)
        hit = picture.stem in answer
        right += hit
        waits.append(first_s)
        print(f"{'yes' if hit else 'NO ':3} {picture.name:14} {answer!r}")
    median_s = sorted(waits)[len(waits) // 2]
    print(
        f"\nopenai {openai.__version__}: {right} of {len(pictures)}, median TTFT {median_s:.3f} s"
    )
    sys.exit(right < 15)


if __name__ == "__main__":
    main()
