"""`halfbyte serve`: OpenAI's API on one machine, over `LanguageModel` and sentence encoders.

Requests, on the event loop
  app.py           routes, and `Gate`: keys, hosts, sizes of bodies
  protocol.py      requests as pydantic models
  completions.py   /v1/completions and /v1/chat/completions: request → sequences, tokens → responses and events
  formats.py       the JSON of answers to them
  vectors.py       /v1/embeddings and /v1/rerank
  chat.py          messages → prompt; text → tool calls
  structured.py    response_format → a logits processor; logit_bias
  replies.py       JSON responses, errors in OpenAI's shape, server-sent events
  metrics.py       Prometheus metrics
  page/            the chat page, page.html
Models, in threads of their own
  engine.py        `Engine`: the thread that owns a `Batch`; `Request`: sequences of one request, as the event loop sees them
  encoder.py       `Encoder`: the thread that owns a sentence encoder
Process
  settings.py      `Settings`: limits and addresses
  server.py        `serve`: socket, signals, orderly end
  connection.py    a client's connection: uvicorn's protocol with limits of time and number
"""
