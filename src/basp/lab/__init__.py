"""An emulated cluster on one Linux machine: nodes are network namespaces, joined by links of a chosen rate."""

from basp.lab.labs import Cluster, Lab, find_lab, lab_names, remove_all_labs, remove_lab, start_lab
from basp.lab.network import Traffic, check_able
from basp.lab.ranks import Run

__all__ = [
    "Cluster",
    "Lab",
    "Run",
    "Traffic",
    "check_able",
    "find_lab",
    "lab_names",
    "remove_all_labs",
    "remove_lab",
    "start_lab",
]
