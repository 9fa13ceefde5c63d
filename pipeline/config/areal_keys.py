"""(placeholder)"""


def replacement(name: str) -> str:
    return ""
