"""Where stations live and how they are reached: launchers, messages, payloads, published weights.

`runtime.memory.tensors` and `runtime.memory.receiver` alone import torch. Nothing here decides anything.
"""
