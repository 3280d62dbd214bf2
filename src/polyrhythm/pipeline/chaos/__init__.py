"""A run under faults: stations are killed, stopped and slowed at random moments, and the promises are checked.

faults    which faults, from a seed; what came of each
pace      throughput in windows, and what is usual
load      how much of the machine others leave to the run
book      where every ticket is, kept from the events alone: the ledger's independent check
watch     applies the faults, one after another, and times the recovery
run       a recipe's run around them, the verdict, what is left behind
"""
