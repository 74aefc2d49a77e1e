"""The regression tables of the catalogue; the first eight are those of the paper's Table 1."""

from __future__ import annotations

from fsmap.data.catalogue import DataFile, DataSet, Download

UCI = "https://archive.ics.uci.edu"
SNELSON_ARCHIVE = "https://www.gatsby.ucl.ac.uk/~snelson/SPGP_dist.zip"
WINE = """fixed_acidity volatile_acidity citric_acid residual_sugar chlorides free_sulfur_dioxide
    total_sulfur_dioxide density pH sulphates alcohol quality"""


def _from_uci(
    name: str,
    title: str,
    file: DataFile,
    source: tuple[int, str, str, str],
    header: str,
    columns: tuple[int, ...] = (),
    note: str = "",
) -> DataSet:
    """A table of the UCI repository: ``source`` is (number, archive, kind, member)."""
    number, archive, kind, member = source
    url = f"{UCI}/static/public/{number}/{archive}.zip"
    download = Download(url, file.path, kind, member, tuple(header.split()), columns)
    return DataSet(name, title, (file,), f"{UCI}/dataset/{number}", (download,), None, note)


BOSTON_FILE = DataFile(
    "uci/boston.csv", "79ac716620024011b03c0c44d2bf99069b8173649181926d9109c25475a3804c", 34_695
)
BOSTON = DataSet(
    "boston",
    "house prices in Boston, 506 × 13",
    (BOSTON_FILE,),
    "https://lib.stat.cmu.edu/datasets/boston",
    (
        Download(
            "https://lib.stat.cmu.edu/datasets/boston",
            BOSTON_FILE.path,
            "statlib",
            header=tuple("CRIM ZN INDUS CHAS NOX RM AGE DIS RAD TAX PTRATIO B LSTAT MEDV".split()),
        ),
    ),
    note="column B is a racial-composition term and the set is deprecated for it: benchmark only",
)
CONCRETE = _from_uci(
    "concrete",
    "compressive strength of concrete, 1030 × 8",
    DataFile(
        "uci/concrete.csv",
        "681282f48bb25e44eb4f4fc69934e209cfb37e5d4189afe83512321c4bce645f",
        49_992,
    ),
    (165, "concrete+compressive+strength", "excel", "Concrete_Data.xls"),
    """cement blast_furnace_slag fly_ash water superplasticizer coarse_aggregate fine_aggregate
    age_days compressive_strength_mpa""",
)
ENERGY = _from_uci(
    "energy",
    "heating load of buildings, 768 × 8",
    DataFile(
        "uci/energy.csv",
        "15bcfc654b7c5067945efd970686188be630281161a62743eb986ff86ff998e8",
        29_084,
    ),
    (242, "energy+efficiency", "excel", "ENB2012_data.xlsx"),
    """relative_compactness surface_area wall_area roof_area overall_height orientation
    glazing_area glazing_area_distribution heating_load""",
    tuple(range(9)),
    "the second target, the cooling load, is left out",
)
NAVAL = _from_uci(
    "naval",
    "decay of a naval gas turbine's compressor, 11934 × 16",
    DataFile(
        "uci/naval.csv",
        "2c8101d7115d563d22a7dca15ec2dcc7fb2e354d1da7d57197b0e4d74c813f7f",
        1_346_283,
    ),
    (316, "condition+based+maintenance+of+naval+propulsion+plants", "space", "data.txt"),
    """lever_position ship_speed gt_shaft_torque gt_rpm gg_rpm starboard_propeller_torque
    port_propeller_torque hp_turbine_exit_temp gt_compressor_inlet_temp gt_compressor_outlet_temp
    hp_turbine_exit_pressure gt_compressor_inlet_pressure gt_compressor_outlet_pressure
    gt_exhaust_pressure turbine_injection_control fuel_flow gt_compressor_decay""",
    tuple(range(17)),
    "two constant columns are dropped when it is read; the second target is left out",
)
POWER = _from_uci(
    "power",
    "output of a power plant, 9568 × 4",
    DataFile(
        "uci/power.csv",
        "3c1fc11025f8424f8d95802d8b7086dffd3f73a552c6dcab3d973620986194b2",
        308_694,
    ),
    (294, "combined+cycle+power+plant", "excel", "Folds5x2_pp.xlsx"),
    "AT V AP RH PE",
)
PROTEIN = _from_uci(
    "protein",
    "deviation of protein structures, 45730 × 9",
    DataFile(
        "uci/protein.csv",
        "5879f143cf15b2f59e63ddd413bc11417b1cd6ef311ff6f449b0aeb5b861e1f0",
        3_528_690,
    ),
    (265, "physicochemical+properties+of+protein+tertiary+structure", "comma", "CASP.csv"),
    "F1 F2 F3 F4 F5 F6 F7 F8 F9 RMSD",
    (*range(1, 10), 0),
)
WINE_RED = _from_uci(
    "winered",
    "quality of red wines, 1599 × 11",
    DataFile(
        "uci/wine_red.csv",
        "b51c8ee6ca1f66473bd98042780da9ce3eceaf6fe113441e8f2c3ee593b02318",
        84_173,
    ),
    (186, "wine+quality", "semicolon", "winequality-red.csv"),
    WINE,
)
WINE_WHITE = _from_uci(
    "winewhite",
    "quality of white wines, 4898 × 11",
    DataFile(
        "uci/wine_white.csv",
        "2c842c4c2fa533aa569d9b8182754f89c7587279def660dcbbf4f1e6ef69673c",
        264_400,
    ),
    (186, "wine+quality", "semicolon", "winequality-white.csv"),
    WINE,
)
YACHT = _from_uci(
    "yacht",
    "resistance of sailing yachts, 308 × 6",
    DataFile(
        "uci/yacht.csv",
        "a767e2387c0db312c9bfb039bfdef76ac1b22d821f71ea0a4f0a695e67dac0fd",
        10_867,
    ),
    (243, "yacht+hydrodynamics", "space", "yacht_hydrodynamics.data"),
    """longitudinal_position prismatic_coefficient length_displacement_ratio beam_draught_ratio
    length_beam_ratio froude_number residuary_resistance""",
)
KIN8NM = DataSet(
    "kin8nm",
    "kinematics of a robot arm, 8192 × 8",
    (
        DataFile(
            "uci/kin8nm.csv",
            "e74acfb93744b300a8bca76890a2a4a2f3dedf0ea6a76a7fb353da44ee91c773",
            815_626,
        ),
    ),
    "https://www.openml.org/d/189",
    (
        Download(
            "https://www.openml.org/data/get_csv/3626/dataset_2175_kin8nm.arff",
            "uci/kin8nm.csv",
            "comma",
            header=(*(f"theta{i}" for i in range(1, 9)), "y"),
        ),
    ),
)
SNELSON = DataSet(
    "snelson",
    "Snelson's one-dimensional regression data, 200 × 1",
    (
        DataFile(
            "uci/snelson1d.csv",
            "981e216b99506cc70b050494cd6b648d9330d154f3a18e4713a5e8555400fa07",
            4_292,
        ),
        DataFile(
            "uci/snelson1d_test_inputs.csv",
            "e7d3dc1c1e0603f1f19aedb9f40b2fe294c14483e3f18d50eff3cac1ad816007",
            2_598,
        ),
    ),
    "https://www.gatsby.ucl.ac.uk/~snelson",
    (
        Download(
            SNELSON_ARCHIVE, "uci/snelson1d.csv", "pair", "train_inputs train_outputs", ("x", "y")
        ),
        Download(SNELSON_ARCHIVE, "uci/snelson1d_test_inputs.csv", "space", "test_inputs", ("x",)),
    ),
)

PAPER_TABLES = (BOSTON, CONCRETE, ENERGY, NAVAL, POWER, PROTEIN, WINE_RED, WINE_WHITE)
TABLES = (*PAPER_TABLES, YACHT, KIN8NM, SNELSON)
