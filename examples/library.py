"""Ten lines of basp in a training script of your own: torchrun --nproc-per-node 4 examples/library.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import basp

dist.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = dist.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("sp",))
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config).to(device)

sp = basp.SequenceParallel(mesh, strategy="basp")
model = basp.prepare(model, sp)  # before fully_shard and torch.compile
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

documents = [list(b"any number of documents "), list(b"of any length. " * 40), list(b"!" * 300)]  # on every rank
for _ in range(10):
    (step,) = sp.shard_steps([documents])  # one micro-batch; a list of several accumulates gradients
    loss = sp.loss(model, step)  # the same on every rank: the mean over all valid tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}, {sp.counter.total:,} bytes sent by rank 0; {step.plan(4)}")
dist.destroy_process_group()
