"""What stores that consist of other stores share: config, calls with limits, joined answers.

Read `member` to see what happens if one of the stores fails or hangs, and `storage` for the calls that
are the same in every composition.
"""
