"""Audit logs: the history of a federation in files whose lines are chained by hashes.

log = AuditLog(Path("runs/study/audit.jsonl"), "server", seal)
log("asked", round=3, clients={0: entry(data)})      # a line, in the file when this returns
log.seal()                                           # a signed head, which may be given away

checked(Path("runs/study/audit.jsonl"), keys)        # an `AuditError` names the line that is wrong
"""
