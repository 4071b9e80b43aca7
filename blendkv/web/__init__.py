"""`blendkv demo --web`: a page that compares full recompute, full reuse and a blend. Needs `blendkv[web]`."""
