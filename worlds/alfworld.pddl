; A household as a problem of ALFWorld's domain. worlds/alfworld.py fills in, in braces, what differs
; from one to another. The rest holds in all: the kinds of receptacles and objects, and what may be
; done with them. A receptacle or an object without a place does not exist for the agent.
(define (problem household)
(:domain alfred)
(:objects
agent1 - agent
start - location
countertop_1 - receptacle  at_countertop - location  countertoptype - rtype
diningtable_1 - receptacle  at_diningtable - location  diningtabletype - rtype
shelf_1 - receptacle  at_shelf - location  shelftype - rtype
desk_1 - receptacle  at_desk - location  desktype - rtype
drawer_1 - receptacle  at_drawer - location  drawertype - rtype
cabinet_1 - receptacle  at_cabinet - location  cabinettype - rtype
box_1 - receptacle  at_box - location  boxtype - rtype
sinkbasin_1 - receptacle  at_sinkbasin - location  sinkbasintype - rtype
microwave_1 - receptacle  at_microwave - location  microwavetype - rtype
fridge_1 - receptacle  at_fridge - location  fridgetype - rtype
mug_1 mug_2 - object  mugtype - otype
cup_1 cup_2 - object  cuptype - otype
plate_1 plate_2 - object  platetype - otype
bowl_1 bowl_2 - object  bowltype - otype
apple_1 apple_2 - object  appletype - otype
egg_1 egg_2 - object  eggtype - otype
bread_1 bread_2 - object  breadtype - otype
potato_1 potato_2 - object  potatotype - otype
tomato_1 tomato_2 - object  tomatotype - otype
lettuce_1 lettuce_2 - object  lettucetype - otype
desklamp_1 - object  desklamptype - otype
)
(:init
(= (total-cost) 0)
(atLocation agent1 start)

; examined means nothing in this domain: here it makes the place known
(receptacleType countertop_1 countertoptype) (examined at_countertop)
(receptacleType diningtable_1 diningtabletype) (examined at_diningtable)
(receptacleType shelf_1 shelftype) (examined at_shelf)
(receptacleType desk_1 desktype) (examined at_desk)
(receptacleType drawer_1 drawertype) (examined at_drawer) (openable drawer_1)
(receptacleType cabinet_1 cabinettype) (examined at_cabinet) (openable cabinet_1)
(receptacleType box_1 boxtype) (examined at_box) (openable box_1)
(receptacleType sinkbasin_1 sinkbasintype) (examined at_sinkbasin)
(receptacleType microwave_1 microwavetype) (examined at_microwave) (openable microwave_1)
(receptacleType fridge_1 fridgetype) (examined at_fridge) (openable fridge_1)

(objectType mug_1 mugtype) (pickupable mug_1) (cleanable mug_1) (heatable mug_1) (coolable mug_1)
(objectType mug_2 mugtype) (pickupable mug_2) (cleanable mug_2) (heatable mug_2) (coolable mug_2)
(objectType cup_1 cuptype) (pickupable cup_1) (cleanable cup_1) (heatable cup_1) (coolable cup_1)
(objectType cup_2 cuptype) (pickupable cup_2) (cleanable cup_2) (heatable cup_2) (coolable cup_2)
(objectType plate_1 platetype) (pickupable plate_1) (cleanable plate_1) (heatable plate_1) (coolable plate_1)
(objectType plate_2 platetype) (pickupable plate_2) (cleanable plate_2) (heatable plate_2) (coolable plate_2)
(objectType bowl_1 bowltype) (pickupable bowl_1) (cleanable bowl_1) (heatable bowl_1) (coolable bowl_1)
(objectType bowl_2 bowltype) (pickupable bowl_2) (cleanable bowl_2) (heatable bowl_2) (coolable bowl_2)
(objectType apple_1 appletype) (pickupable apple_1) (cleanable apple_1) (heatable apple_1) (coolable apple_1)
(objectType apple_2 appletype) (pickupable apple_2) (cleanable apple_2) (heatable apple_2) (coolable apple_2)
(objectType egg_1 eggtype) (pickupable egg_1) (cleanable egg_1) (heatable egg_1) (coolable egg_1)
(objectType egg_2 eggtype) (pickupable egg_2) (cleanable egg_2) (heatable egg_2) (coolable egg_2)
(objectType bread_1 breadtype) (pickupable bread_1) (cleanable bread_1) (heatable bread_1) (coolable bread_1)
(objectType bread_2 breadtype) (pickupable bread_2) (cleanable bread_2) (heatable bread_2) (coolable bread_2)
(objectType potato_1 potatotype) (pickupable potato_1) (cleanable potato_1) (heatable potato_1) (coolable potato_1)
(objectType potato_2 potatotype) (pickupable potato_2) (cleanable potato_2) (heatable potato_2) (coolable potato_2)
(objectType tomato_1 tomatotype) (pickupable tomato_1) (cleanable tomato_1) (heatable tomato_1) (coolable tomato_1)
(objectType tomato_2 tomatotype) (pickupable tomato_2) (cleanable tomato_2) (heatable tomato_2) (coolable tomato_2)
(objectType lettuce_1 lettucetype) (pickupable lettuce_1) (cleanable lettuce_1) (heatable lettuce_1) (coolable lettuce_1)
(objectType lettuce_2 lettucetype) (pickupable lettuce_2) (cleanable lettuce_2) (heatable lettuce_2) (coolable lettuce_2)
(objectType desklamp_1 desklamptype) (toggleable desklamp_1)

; everything fits everywhere
(canContain countertoptype mugtype) (canContain countertoptype cuptype) (canContain countertoptype platetype) (canContain countertoptype bowltype) (canContain countertoptype appletype)
(canContain countertoptype eggtype) (canContain countertoptype breadtype) (canContain countertoptype potatotype) (canContain countertoptype tomatotype) (canContain countertoptype lettucetype)
(canContain diningtabletype mugtype) (canContain diningtabletype cuptype) (canContain diningtabletype platetype) (canContain diningtabletype bowltype) (canContain diningtabletype appletype)
(canContain diningtabletype eggtype) (canContain diningtabletype breadtype) (canContain diningtabletype potatotype) (canContain diningtabletype tomatotype) (canContain diningtabletype lettucetype)
(canContain shelftype mugtype) (canContain shelftype cuptype) (canContain shelftype platetype) (canContain shelftype bowltype) (canContain shelftype appletype)
(canContain shelftype eggtype) (canContain shelftype breadtype) (canContain shelftype potatotype) (canContain shelftype tomatotype) (canContain shelftype lettucetype)
(canContain desktype mugtype) (canContain desktype cuptype) (canContain desktype platetype) (canContain desktype bowltype) (canContain desktype appletype)
(canContain desktype eggtype) (canContain desktype breadtype) (canContain desktype potatotype) (canContain desktype tomatotype) (canContain desktype lettucetype)
(canContain drawertype mugtype) (canContain drawertype cuptype) (canContain drawertype platetype) (canContain drawertype bowltype) (canContain drawertype appletype)
(canContain drawertype eggtype) (canContain drawertype breadtype) (canContain drawertype potatotype) (canContain drawertype tomatotype) (canContain drawertype lettucetype)
(canContain cabinettype mugtype) (canContain cabinettype cuptype) (canContain cabinettype platetype) (canContain cabinettype bowltype) (canContain cabinettype appletype)
(canContain cabinettype eggtype) (canContain cabinettype breadtype) (canContain cabinettype potatotype) (canContain cabinettype tomatotype) (canContain cabinettype lettucetype)
(canContain boxtype mugtype) (canContain boxtype cuptype) (canContain boxtype platetype) (canContain boxtype bowltype) (canContain boxtype appletype)
(canContain boxtype eggtype) (canContain boxtype breadtype) (canContain boxtype potatotype) (canContain boxtype tomatotype) (canContain boxtype lettucetype)
(canContain sinkbasintype mugtype) (canContain sinkbasintype cuptype) (canContain sinkbasintype platetype) (canContain sinkbasintype bowltype) (canContain sinkbasintype appletype)
(canContain sinkbasintype eggtype) (canContain sinkbasintype breadtype) (canContain sinkbasintype potatotype) (canContain sinkbasintype tomatotype) (canContain sinkbasintype lettucetype)
(canContain microwavetype mugtype) (canContain microwavetype cuptype) (canContain microwavetype platetype) (canContain microwavetype bowltype) (canContain microwavetype appletype)
(canContain microwavetype eggtype) (canContain microwavetype breadtype) (canContain microwavetype potatotype) (canContain microwavetype tomatotype) (canContain microwavetype lettucetype)
(canContain fridgetype mugtype) (canContain fridgetype cuptype) (canContain fridgetype platetype) (canContain fridgetype bowltype) (canContain fridgetype appletype)
(canContain fridgetype eggtype) (canContain fridgetype breadtype) (canContain fridgetype potatotype) (canContain fridgetype tomatotype) (canContain fridgetype lettucetype)

; what stands in this household, what is open, and where its objects are
{facts}
)

; the goal as the package alfworld has it, with the end of the problem
{goal}
