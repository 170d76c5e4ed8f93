"""What a training checkpoint holds, and how it is checked before training resumes."""
