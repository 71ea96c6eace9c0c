"""The stages of a night: storage around the pure parts, refs in, refs out, each idempotent.

    ingest -> sequences (a bucket each) -> vocabulary -> pack -> train | evaluate -> register -> gate -> finish

`data` holds the stages up to packs, `training` the child process, `judging` what follows. Every stage returns plain
JSON values (URIs, counts, digests, `seconds`); none returns a frame or a tensor. The order, fan-out and retries are
the flow's business (flows/, tasks/).
"""
