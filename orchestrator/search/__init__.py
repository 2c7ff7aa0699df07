"""Search: which candidate to measure next, from the sweep's state and what the cost model predicts.

Stands on space and sweep, and on the cost model in cluster; independent of plans and controllers.
"""
