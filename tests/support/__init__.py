"""What tests share: ranks in processes, and oracles that share no code with basp."""
