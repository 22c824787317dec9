"""Server-sent events, read without any client library.

A stream is a series of lines. `data: {...}` is an event, `data: [DONE]` the last one, and a line
that begins with a colon is a comment that keeps the connection open.
"""

from __future__ import annotations

import json
import os
from urllib.request import Request, urlopen

URL = os.environ.get("URL", "http://127.0.0.1:8000")
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('API_KEY', 'none')}",
}

body = {"prompt": "Iron is made from", "max_tokens": 40, "temperature": 0, "stream": True}
request = Request(f"{URL}/v1/completions", json.dumps(body).encode(), HEADERS)
with urlopen(request) as response:
    print("request", response.headers["x-request-id"])
    print(body["prompt"], end="")
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            break
        if data.startswith("{"):
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(event["error"]["message"])
            for choice in event["choices"]:
                print(choice["text"], end="", flush=True)
print()
