"""A store behind HTTP: `blendkv serve`. Nothing else of blendkv imports this; it needs `blendkv[serve]`."""
