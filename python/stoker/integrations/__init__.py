"""Stoker in the tools that people train with. Each module here needs its tool installed; `import
stoker` needs none of them."""
