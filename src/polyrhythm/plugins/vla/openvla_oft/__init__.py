"""OpenVLA-OFT (Kim et al. 2025): actions as tokens, or as numbers from the L1 head, in one parallel pass."""
