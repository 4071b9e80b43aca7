"""blendkv in other frameworks: each module needs its own, and nothing else imports it."""
