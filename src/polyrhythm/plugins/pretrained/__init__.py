"""Released folders of pretrained policies: opened, filled into networks, adapted, saved, merged and inspected."""
