"""Keys that recipes once had, each with what to write instead. One line a key: an old recipe is easy to mend."""

REMOVED: dict[str, str] = {
    "data.cache_gigabytes": "remove it: online features are computed for every step",
    "data.long_prompts": "remove it: a prompt that is too long loses its beginning, a given conversation is left out",
    "data.max_bad_fraction": "remove it: up to 1% of the rows may be unusable",
    "data.mode": "remove it for offline; for online, write data.online: [auto]",
    "data.online_devices": "write these devices in data.online",
    "data.self_language": "remove it, and steer the language with data.self_system_prompts",
    "data.self_top_p": "remove it, and lower data.self_temperature for likelier words",
    "data.self_turns": "remove it: the target writes prompts of one turn",
    "data.server_retries": "remove it: a failed request is sent again five times",
    "data.shuffle_shards": "remove it: all shards are shuffled together",
}

# The only value that is left of removed keys that stages recorded: a stage that was made with it is reused.
REMAINING_VALUES = {
    "data.long_prompts": "cut",
    "data.self_language": None,
    "data.self_top_p": 1.0,
    "data.self_turns": 1,
}
