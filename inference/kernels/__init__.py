"""Speed on a CPU, optional: packed weights, products in C++, compiled layers, and how many threads."""
