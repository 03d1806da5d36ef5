"""Trains digits with one method in an own loop, as a user would; the lead prints what came of it."""

import json
import sys

import torch

import manyhands as mh
from manyhands import tasks

task = tasks.load("digits")
torch.manual_seed(0)
model = task.model()
strategy = {"ssp": mh.ssp, "pipedream": mh.pipedream}[sys.argv[1]]()

with mh.join(model, loss=task.loss, strategy=strategy) as hands:
    for x, y in hands.share(task.data, batch_size=task.batch_size, epochs=10):
        hands.step(x, y)

if hands.lead:
    x, y = task.test.tensors
    accuracy = (model.eval()(x).argmax(1) == y).float().mean().item()
    print(json.dumps({"accuracy": accuracy, "hosts": list(hands.transport.hosts), "sent": hands.transport.bytes_sent}))
