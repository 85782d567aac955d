"""Makes a draft for a target out of the target alone: its own conversations, a few of its layers, part of its head.

`pipeline.make_draft` is the whole way; `student.load_student` is all that serving needs.
"""

DRAFT = "draft.json"
"""What makes a folder that of a draft which `forerun distill` made."""
