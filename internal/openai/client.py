"""client.py BASE_URL...: what OpenAI's Python client makes of the API at each BASE_URL.

It asks each in turn for a streamed chat completion, without retries, and prints JSON,
an object a line: {"client": ...} in the beginning, {"piece": ...} for each piece of
text, {"outcome": ...} at the end of each answer.
"""

import json
import platform
import sys

import openai


def say(**line):
    print(json.dumps(line), flush=True)


def outcome(e, text):
    if e is None:
        return {"text": text}
    return {
        "text": text,
        "raised": [c.__name__ for c in type(e).__mro__ if issubclass(c, Exception)],
        "apiError": isinstance(e, openai.APIError),
        "cause": type(e.__cause__).__name__ if e.__cause__ else None,
        "message": str(e),
        "type": getattr(e, "type", None),
        "code": getattr(e, "code", None),
        "status": getattr(e, "status_code", None),
        "body": getattr(e, "body", None),
    }


say(client=f"openai {openai.__version__}, Python {platform.python_version()}")
client = openai.OpenAI(base_url="http://unused", api_key="none", max_retries=0, timeout=30)
for url in sys.argv[1:]:
    text, raised = "", None
    try:
        for chunk in client.with_options(base_url=url).chat.completions.create(
            model="model", messages=[{"role": "user", "content": "Hello."}], stream=True
        ):
            piece = chunk.choices[0].delta.content
            text += piece
            say(piece=piece)
    except Exception as e:
        raised = e
    say(outcome=outcome(raised, text))
