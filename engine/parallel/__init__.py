"""One model over several processes, each with a share of the heads and of the MLP (Shoeybi et al. 2019, Megatron-LM)."""
