"""OpenVLA-OFT (Kim et al. 2025): action tokens, or numbers from the L1 head, in one parallel pass."""
