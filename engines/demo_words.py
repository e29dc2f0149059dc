"""Common English words that the demo tokenizer knows as whole tokens, so that random models speak in words."""

from __future__ import annotations

_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most made
after also did many off before must well back through years much where your way down should because long each just
state those people too little world still good year old great men life use work three never make own here yet against
right take day under another last might place came during without again around however home small found thought went say
part once general high upon school every does got united left number course war until always away something fact water
less public put thing almost hand enough far took head yet government system better set told nothing night end why
called eyes find going look asked later knew point next city business give group toward young days let room side social
given present several order national second possible rather face per among form important often things looked early
white case become large big need four within felt along children saw best church ever least power light family interest
want mind country area done open turned god service certain kind problem began different door thus help sense means
whole matter money name line help money north car letter answer river mountain garden window bridge market station
engine train rail wheel track signal steam iron copper silver gold stone wood paper glass silk cotton winter summer
spring autumn morning evening storm cloud thunder rain snow wind fire earth ocean island harbor ship captain sailor
queen king prince castle tower forest valley desert meadow orchard apple bread butter cheese honey coffee sugar salt
pepper dinner kitchen table chair mirror candle lamp clock hour minute season month friend brother sister mother father
doctor teacher farmer baker writer painter singer dancer player winner music piano violin drum story novel poem chapter
page word question reason idea dream memory future history science number square circle triangle angle color green blue
yellow orange purple brown black quick slow bright dark warm cold quiet loud simple strange gentle brave clever honest
proud happy lonely curious patient silent golden hidden ancient modern distant narrow broad heavy hollow smooth sharp
sweet bitter walk run jump climb swim fly travel arrive depart return follow lead carry build break repair paint write
read listen speak whisper laugh smile remember forget believe wonder explain describe measure count compare choose
decide begin finish wait hurry rest sleep wake buy sell pay trade offer accept refuse agree support order ticket
customer account invoice refund delivery product price discount contract clause court judge law rule report summary
review update version release server network model token queue memory cache report budget quarter revenue profit
"""

WORDS = tuple(dict.fromkeys(_TEXT.split()))
