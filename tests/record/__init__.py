"""The record of what must stay equal: what a commit computes, in one JSON file, so that a rewrite can be compared.

    python -m tests.record make FILE [--only PART[,PART]] [--costs OLD]     writes the record of the checked-out commit
    python -m tests.record compare A B                                      exit code 1 if anything differs

    part        what it holds
    runs        losses, gradient norms, and digests of weights and optimizer state after 20 steps
    examples    the same of examples/, and the weights that an export writes
    data        digests of all prepared data
    plans       plans of models on clusters: the default, schedule=auto, one stage too large; refusals
    best        BEST=1 of the same
    costs       the estimated layer costs that plans and best took
    tables      Tables 1, 2 and 3; the times of 2 and 3 are made up, since measured ones do not repeat
    help        the help of every command

Make both records on one machine: the bits of a run depend on its processor. ``--costs OLD`` plans from the costs of an
older record, so that two planners get equal ones; the part costs still has the commit's own. CPU seconds, commit and
date are information, and so are costs of shapes that only one planner asked for.

Not recorded: schedule=auto in runs (its costs are measured; a schedule from a file takes the same way), GPUs, bf16 on
other processors, measured times.

The record reads public commands and the files of a run's folder. It imports the product in ``gpipe.command``,
``costs.feed``, ``costs.two_cores``, ``data.prepared``, ``pages.members`` and ``pages.made_up_times`` alone: after a
rewrite, change these, and copy the same change into the older commit.
"""
