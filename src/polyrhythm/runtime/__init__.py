"""Where stations live and how they are reached: launchers, messages, payloads, weights bus.

`runtime.memory.tensors` alone imports torch; `runtime.ray` alone imports ray. Nothing here decides anything.
"""
