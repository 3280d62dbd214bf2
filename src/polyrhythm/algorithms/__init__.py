"""Advantages, losses and levels: pure functions of tensors (torch only), without configuration or logging.

Terms: a *chunk step* is one decision of the policy (a chunk of C primitive actions, or a language model's answer); an
*entry* is what one loss value covers at its level (a token, an action or a chunk). Masks and weights are arguments;
where a mean is meant, the caller gives the normaliser.
"""
