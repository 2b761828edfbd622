"""Atom maps of well-known reactions by rxnmapper itself: what the chemistry example must find.

Needs an environment of its own, as rxnmapper runs with transformers 4: ``pip install rxnmapper==0.4.3 rdkit
"transformers<5" "setuptools<81"``. Each reaction is stored as rxnmapper canonicalizes it; its map names, for each atom
of the product, the atom of the reactants that it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXPECTED = Path(__file__).parent / "expected" / "atom_maps.json"

REACTIONS = {
    "amide from an acyl chloride": "CC(=O)Cl.NCC>>CC(=O)NCC",
    "Fischer esterification": "OC(=O)c1ccccc1.CCO>>CCOC(=O)c1ccccc1",
    "acetylation: aspirin": "CC(=O)OC(C)=O.Oc1ccccc1C(=O)O>>CC(=O)Oc1ccccc1C(=O)O",
    "acetylation: paracetamol": "CC(=O)OC(C)=O.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1",
    "Suzuki coupling": "OB(O)c1ccccc1.Brc1ccc(C#N)cc1>>N#Cc1ccc(-c2ccccc2)cc1",
    "Buchwald-Hartwig amination": "Brc1ccc(OC)cc1.C1COCCN1>>COc1ccc(N2CCOCC2)cc1",
    "Sonogashira coupling": "C#Cc1ccccc1.Ic1ccc(C)cc1>>Cc1ccc(C#Cc2ccccc2)cc1",
    "Heck reaction": "C=CC(=O)OC.Ic1ccccc1>>COC(=O)C=Cc1ccccc1",
    "Diels-Alder": "C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1",
    "Wittig": "O=Cc1ccccc1.C=P(c1ccccc1)(c1ccccc1)c1ccccc1>>C=Cc1ccccc1",
    "Grignard and ketone": "CC(=O)c1ccccc1.C[Mg]Br>>CC(C)(O)c1ccccc1",
    "reductive amination": "O=Cc1ccc(F)cc1.CNC>>CN(C)Cc1ccc(F)cc1",
    "Boc protection": "CC(C)(C)OC(=O)OC(=O)OC(C)(C)C.NCc1ccccc1>>CC(C)(C)OC(=O)NCc1ccccc1",
    "Boc removal": "CC(C)(C)OC(=O)N1CCN(c2ccccc2)CC1.OC(=O)C(F)(F)F>>c1ccc(N2CCNCC2)cc1",
    "saponification": "CCOC(=O)c1cccc(Cl)c1.[OH-].[Na+]>>OC(=O)c1cccc(Cl)c1",
    "nitro reduction": "O=[N+]([O-])c1ccc(Br)cc1.[Fe].Cl>>Nc1ccc(Br)cc1",
    "nucleophilic aromatic substitution": "O=[N+]([O-])c1ccc(F)cc1.NCCO>>O=[N+]([O-])c1ccc(NCCO)cc1",
    "Williamson ether": "Oc1ccc(C=O)cc1.BrCC=C.O=C([O-])[O-].[K+].[K+]>>C=CCOc1ccc(C=O)cc1",
    "Mitsunobu": "Oc1ccccc1.OCc1ccncc1.CCOC(=O)N=NC(=O)OCC>>c1ccc(OCc2ccncc2)cc1",
    "click": "C#Cc1ccccc1.[N-]=[N+]=NCc1ccccc1>>c1ccc(Cn2cc(-c3ccccc3)nn2)cc1",
    "Friedel-Crafts acylation": "CC(=O)Cl.COc1ccccc1>>COc1ccc(C(C)=O)cc1",
    "aldol condensation": "CC(=O)c1ccccc1.O=Cc1ccc(Cl)cc1>>O=C(C=Cc1ccc(Cl)cc1)c1ccccc1",
    "bromination": "COc1ccccc1.O=C1CCC(=O)N1Br>>COc1ccc(Br)cc1",
    "sulfonamide": "Cc1ccc(S(=O)(=O)Cl)cc1.NCCc1ccccc1>>Cc1ccc(S(=O)(=O)NCCc2ccccc2)cc1",
    "urea from an isocyanate": "O=C=Nc1ccccc1.NC1CCCCC1>>O=C(Nc1ccccc1)NC1CCCCC1",
    "silyl protection": "CC(C)(C)[Si](C)(C)Cl.OCCCBr>>CC(C)(C)[Si](C)(C)OCCCBr",
    "ketone reduction": "CC(=O)c1ccc(Br)cc1.[BH4-].[Na+]>>CC(O)c1ccc(Br)cc1",
    "alcohol oxidation": "OCc1ccc(Cl)nc1.ClC(Cl)Cl>>O=Cc1ccc(Cl)nc1",
    "epoxide opening": "C1OC1c1ccccc1.CNC>>CN(C)CC(O)c1ccccc1",
    "Michael addition": "C=CC(C)=O.CCOC(=O)CC(=O)OCC>>CCOC(=O)C(CCC(C)=O)C(=O)OCC",
    "amide from an acid": "O=C(O)c1ccc(F)cc1.NCC1CC1.CCN=C=NCCCN(C)C>>O=C(NCC1CC1)c1ccc(F)cc1",
    "Claisen rearrangement": "C=CCOc1ccccc1>>C=CCc1ccccc1O",
    "cyanohydrin": "O=Cc1ccccc1.[C-]#N.[Na+]>>N#CC(O)c1ccccc1",
    "hydrazone": "NNc1ccccc1.CC(C)=O>>CC(C)=NNc1ccccc1",
    "chlorination of an alcohol": "OCCc1ccccc1.O=S(Cl)Cl>>ClCCc1ccccc1",
    "Gabriel synthesis": "O=C1NC(=O)c2ccccc21.BrCCC#N>>N#CCCN1C(=O)c2ccccc2C1=O",
    "ring closing metathesis": "C=CCN(CC=C)S(=O)(=O)c1ccc(C)cc1>>Cc1ccc(S(=O)(=O)N2CC=CC2)cc1",
    "benzyl ether hydrogenolysis": "COC(=O)c1ccc(OCc2ccccc2)cc1.[H][H]>>COC(=O)c1ccc(O)cc1",
    "lidocaine": "CCNCC.Cc1cccc(C)c1NC(=O)CCl>>CCN(CC)CC(=O)Nc1c(C)cccc1C",
    "imatinib's last amide": "Cc1ccc(N)cc1Nc1nccc(-c2cccnc2)n1.CN1CCN(Cc2ccc(C(=O)Cl)cc2)CC1"
                             ">>Cc1ccc(NC(=O)c2ccc(CN3CCN(C)CC3)cc2)cc1Nc1nccc(-c2cccnc2)n1",
}


def maps() -> list[dict[str, object]]:
    """Name, canonical reaction and map of each, by the package, all in one batch."""
    from rxn.chemutils.reaction_smiles import ReactionFormat, parse_any_reaction_smiles, to_reaction_smiles
    from rxnmapper import RXNMapper
    from rxnmapper.smiles_utils import process_reaction

    canonical = [to_reaction_smiles(process_reaction(parse_any_reaction_smiles(reaction)),
                                    reaction_format=ReactionFormat.STANDARD_WITH_TILDE)
                 for reaction in REACTIONS.values()]
    found = RXNMapper().get_attention_guided_atom_maps(list(REACTIONS.values()), detailed_output=True)
    return [{"name": name, "reaction": reaction, "map": [int(x) for x in result["pxr_mapping_vector"]],
             "confidence": round(result["confidence"], 4)}
            for name, reaction, result in zip(REACTIONS, canonical, found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the committed maps")
    check = parser.parse_args().check
    text = "[\n" + ",\n".join(json.dumps(entry) for entry in maps()) + "\n]\n"
    if not check:
        EXPECTED.write_text(text)
    elif EXPECTED.read_text() != text:
        raise SystemExit(f"{EXPECTED.name} differs")
    print(f"{EXPECTED.name}: {len(REACTIONS)} reactions" + (", identical" if check else ""))


if __name__ == "__main__":
    main()
