"""Folders of files with an index: weights of transformers in files of torch.save, and all that ColossalAI writes."""
