"""Search: chooses the next candidate to measure, from the sweep's state and the cost model's predictions.

Depends on space and sweep, and on the cost model in cluster; independent of plans and controllers.
"""
